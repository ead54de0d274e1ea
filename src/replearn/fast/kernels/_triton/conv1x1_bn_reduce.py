"""The Triton kernel for the gradient of an expansion's narrow input: two products, a shift and a ReLU's mask."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import launch_cached

jit: Any = triton.jit
INNER = 64  # how far along the rows a program reads at a time
OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 3}


@jit
def times(made, x, weight, row, column, inner, width, INNER: tl.constexpr):
    """A tile of x weight on top of what there is: x has rows of `inner` numbers, and weight of `width`."""
    k = tl.arange(0, INNER)
    left = x + row[:, None] * inner + k[None, :]
    right = weight + k[:, None] * width + column[None, :]
    for start in range(0, inner, INNER):
        made = tl.dot(tl.load(left + start), tl.load(right + start * width), made)
    return made


@jit(do_not_specialize=["rows"])
def narrowing_kernel(
    grad, h, scaled, along, shift, out, rows, wide, narrow,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """out = grad scaled + h along + shift, or nothing where h is from a ReLU that let nothing through."""
    across = narrow // COLUMNS
    place = tl.program_id(0)  # neighbours take the same rows, which are then read from memory once
    row = (place // across) * ROWS + tl.arange(0, ROWS)
    column = (place % across) * COLUMNS + tl.arange(0, COLUMNS)
    within = tl.minimum(row, rows - 1)  # rows beyond the last are computed from it, and not stored
    made = tl.zeros((ROWS, COLUMNS), tl.float32)
    made = times(made, grad, scaled, within, column, wide, narrow, INNER)
    made = times(made, h, along, within, column, narrow, narrow, INNER)
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
    launch_cached(narrowing_kernel, programs, h, (h.dtype, wide, narrow, masked), given, **OPTIONS)


def can_be_cut(wide: int, narrow: int) -> bool:
    return wide % INNER == 0 and narrow % INNER == 0
