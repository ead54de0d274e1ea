"""Triton kernel of the input gradient of a 1x1 convolution with BatchNorm: two matmuls, a shift, a ReLU mask."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import launch_cached

jit: Any = triton.jit
INNER = 64  # BLOCK_K
OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 3}


@jit
def matmul_tile(made, x, weight, row, column, inner, width, INNER: tl.constexpr):
    """made + a tile of x @ weight, for x (rows, inner) and weight (inner, width)."""
    k = tl.arange(0, INNER)
    left = x + row[:, None] * inner + k[None, :]
    right = weight + k[:, None] * width + column[None, :]
    for start in range(0, inner, INNER):
        made = tl.dot(tl.load(left + start), tl.load(right + start * width), made)
    return made


@jit(do_not_specialize=["rows"])
def input_grad_kernel(
    grad, h, scaled, along, shift, out, rows, wide, narrow,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """out = grad scaled + h along + shift; 0 where MASKED and h <= 0."""
    across = narrow // COLUMNS
    place = tl.program_id(0)  # neighbours share rows in L2
    row = (place // across) * ROWS + tl.arange(0, ROWS)
    column = (place % across) * COLUMNS + tl.arange(0, COLUMNS)
    within = tl.minimum(row, rows - 1)  # rows past the end are computed and not stored
    made = tl.zeros((ROWS, COLUMNS), tl.float32)
    made = matmul_tile(made, grad, scaled, within, column, wide, narrow, INNER)
    made = matmul_tile(made, h, along, within, column, narrow, narrow, INNER)
    made += tl.load(shift + column)[None, :].to(tl.float32)
    if MASKED:
        made = tl.where(tl.load(h + within[:, None] * narrow + column[None, :]) <= 0, 0.0, made)
    at = row[:, None] * narrow + column[None, :]
    tl.store(out + at, made.to(out.dtype.element_ty), mask=row[:, None] < rows)


def launch(
    grad: Tensor, h: Tensor, scaled: Tensor, along: Tensor, shift: Tensor, out: Tensor, *, masked: bool
) -> None:
    """All of them are contiguous, in one dtype, and begin at multiples of 16 bytes."""
    (rows, narrow), wide = h.shape, grad.shape[1]
    tile = (64, 128) if narrow % 128 == 0 else (128, 64)
    programs = -(-rows // tile[0]) * (narrow // tile[1])
    given = (grad, h, scaled, along, shift, out, rows, wide, narrow, *tile, INNER, masked)
    launch_cached(input_grad_kernel, programs, h, (h.dtype, wide, narrow, masked), given, **OPTIONS)


def can_tile(wide: int, narrow: int) -> bool:
    return wide % INNER == 0 and narrow % INNER == 0
