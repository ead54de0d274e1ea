"""Triton kernel of the end of a reduced bottleneck: matmul, shift, residual and ReLU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import launch_cached
from .linear_residual import matmul_tile

jit: Any = triton.jit
ROWS, STAGES = 128, 3
# BLOCK_N, BLOCK_K and warps
LITTLE, MUCH = (64, 32, 4), (128, 64, 8)


@jit(do_not_specialize=["rows"])
def add_relu_kernel(
    x, z, scaled, shift, out, rows, inner, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """out = relu(x + z scaled^T + shift)."""
    across = width // COLUMNS
    place = tl.program_id(0)  # neighbours share rows in L2
    row = (place // across) * ROWS + tl.arange(0, ROWS)
    column = (place % across) * COLUMNS + tl.arange(0, COLUMNS)
    within = tl.minimum(row, rows - 1)  # rows past the end are computed and not stored
    made = tl.zeros((ROWS, COLUMNS), tl.float32)
    made = matmul_tile(made, z, scaled, within, column, inner, INNER, z.dtype.element_ty)
    made += tl.load(shift + column)[None, :].to(tl.float32)
    made += tl.load(x + within[:, None] * width + column[None, :]).to(tl.float32)
    made = tl.where(made <= 0, 0.0, made)  # propagates NaN
    at = row[:, None] * width + column[None, :]
    tl.store(out + at, made.to(out.dtype.element_ty), mask=row[:, None] < rows)


def launch(x: Tensor, z: Tensor, scaled: Tensor, shift: Tensor, out: Tensor) -> None:
    """All tensors are contiguous, of one dtype, and aligned to 16 bytes."""
    (rows, width), inner = x.shape, z.shape[1]
    columns, step, warps = LITTLE if inner <= 128 else MUCH
    programs = -(-rows // ROWS) * (width // columns)
    given = (x, z, scaled, shift, out, rows, inner, width, ROWS, columns, step)
    launch_cached(add_relu_kernel, programs, x, (x.dtype, inner, width), given, num_warps=warps, num_stages=STAGES)


def can_tile(width: int, inner: int) -> bool:
    return width % 128 == 0 and inner % 64 == 0
