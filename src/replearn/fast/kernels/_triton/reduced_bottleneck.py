"""The Triton kernel that a squeeze ends with: a product, a shift, the residual and the ReLU, written once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import launch_cached
from .linear_residual import multiplied

jit: Any = triton.jit
ROWS, STAGES = 128, 3
# columns of a program's tile, how far along the narrow side it reads at a time, and its warps
LITTLE, MUCH = (64, 32, 4), (128, 64, 8)


@jit(do_not_specialize=["rows"])
def closing_kernel(
    x, z, scaled, shift, out, rows, inner, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """out = relu(x + z scaled^T + shift)."""
    across = width // COLUMNS
    place = tl.program_id(0)  # neighbours take the same rows, which are then read from memory once
    row = (place // across) * ROWS + tl.arange(0, ROWS)
    column = (place % across) * COLUMNS + tl.arange(0, COLUMNS)
    within = tl.minimum(row, rows - 1)  # rows beyond the last are computed from it, and not stored
    made = tl.zeros((ROWS, COLUMNS), tl.float32)
    made = multiplied(made, z, scaled, within, column, inner, INNER, z.dtype.element_ty)
    made += tl.load(shift + column)[None, :].to(tl.float32)
    made += tl.load(x + within[:, None] * width + column[None, :]).to(tl.float32)
    made = tl.where(made <= 0, 0.0, made)  # so that what is not a number stays that
    at = row[:, None] * width + column[None, :]
    tl.store(out + at, made.to(out.dtype.element_ty), mask=row[:, None] < rows)


def launch(x: Tensor, z: Tensor, scaled: Tensor, shift: Tensor, out: Tensor) -> None:
    """All of them are contiguous, in one dtype, and begin at multiples of 16 bytes."""
    (rows, width), inner = x.shape, z.shape[1]
    columns, step, warps = LITTLE if inner <= 128 else MUCH  # to multiply, for what is moved
    programs = -(-rows // ROWS) * (width // columns)
    given = (x, z, scaled, shift, out, rows, inner, width, ROWS, columns, step)
    launch_cached(closing_kernel, programs, x, (x.dtype, inner, width), given, num_warps=warps, num_stages=STAGES)


def can_be_cut(width: int, inner: int) -> bool:
    return width % 128 == 0 and inner % 64 == 0
