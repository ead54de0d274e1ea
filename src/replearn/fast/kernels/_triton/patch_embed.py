"""Triton kernel of patch embedding: an implicit matmul of patches and weight, plus a row of the table.

Pixels are loaded from images of any strides and cast; rows before the first patch are rows of the table alone.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import launch as launch_kernel

jit: Any = triton.jit


@jit(do_not_specialize=["rows"])
def embed_kernel(
    images, weight, table, out, rows, tokens, first, across,
    image_stride, channel_stride, y_stride, x_stride, width,
    CHANNELS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = weight.dtype.element_ty
    LENGTH: tl.constexpr = CHANNELS * HEIGHT * WIDTH
    tiles = width // COLUMNS
    place = tl.program_id(0)
    row = (place // tiles) * ROWS + tl.arange(0, ROWS)
    column = (place % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    token = row % tokens
    patch = token - first
    seen = (row < rows) & (patch >= 0)
    corner = (row // tokens) * image_stride + (patch // across) * (HEIGHT * y_stride)
    corner += (patch % across) * (WIDTH * x_stride)
    made = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, LENGTH, INNER):
        k = start + tl.arange(0, INNER)
        pixel = (
            (k // (HEIGHT * WIDTH)) * channel_stride + (k // WIDTH % HEIGHT) * y_stride + (k % WIDTH) * x_stride
        )
        left = tl.load(images + corner[:, None] + pixel[None, :], mask=seen[:, None], other=0.0).to(DTYPE)
        right = tl.load(weight + column[None, :] * LENGTH + k[:, None])
        made = tl.dot(left, right, made)
    made += tl.load(table + token[:, None] * width + column[None, :])
    tl.store(out + row[:, None] * width + column[None, :], made, mask=row[:, None] < rows)


def launch(images: Tensor, weight: Tensor, table: Tensor, first: int, out: Tensor) -> None:
    """The tokens of `images` into `out`; weight, table and out are contiguous."""
    width, channels, height, across = weight.shape
    rows = out.shape[0] * out.shape[1]
    if rows <= 1024:  # many short programs
        tile, stages = (32, 32, 64), 4
    else:
        tile, stages = (64, 128 if width % 128 == 0 else 64, 64), 3
    programs = -(-rows // tile[0]) * (width // tile[1])
    sizes = (out.shape[1], first, images.shape[3] // across, *images.stride(), width, channels, height, across)
    given = (images, weight, table, out, rows, *sizes, *tile)
    launch_kernel(embed_kernel, programs, images, *given, num_warps=4, num_stages=stages)
