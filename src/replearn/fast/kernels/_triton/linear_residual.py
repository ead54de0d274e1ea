"""The Triton kernel of a residual layer, and its launch.

A program makes a tile of the result. It multiplies in half precision and sums in float32, along h first, and then,
where there is a branch, along u, which it rounds as it reads it: no rounded copy of u is ever stored, and the
product is not either. What it made is added to u itself, in float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import launch_cached
from .linear_residual_tiles import Tile

jit: Any = triton.jit


@jit
def multiplied(made, x, weight, row, column, inner, INNER: tl.constexpr, KIND: tl.constexpr):
    """A tile of x weight^T on top of what there is, x rounded as it is read."""
    k = tl.arange(0, INNER)
    left = x + row[:, None] * inner + k[None, :]
    right = weight + column[None, :] * inner + k[:, None]
    for start in range(0, inner, INNER):
        made = tl.dot(tl.load(left + start).to(KIND), tl.load(right + start), made)
    return made


@jit(do_not_specialize=["rows"])
def residual_kernel(
    u, h, weight, bias, branch, out, rows, inner, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, BIASED: tl.constexpr, BRANCHED: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = h.dtype.element_ty
    across = width // COLUMNS
    place = tl.program_id(0)  # neighbours take the same rows, which are then read from memory once
    row = (place // across) * ROWS + tl.arange(0, ROWS)
    column = (place % across) * COLUMNS + tl.arange(0, COLUMNS)
    within = tl.minimum(row, rows - 1)  # rows beyond the last are computed from it, and not stored
    made = tl.zeros((ROWS, COLUMNS), tl.float32)
    made = multiplied(made, h, weight, within, column, inner, INNER, kind)
    if BRANCHED:
        made = multiplied(made, u, branch, within, column, width, INNER, kind)
    if BIASED:
        made += tl.load(bias + column)[None, :].to(tl.float32)
    at = row[:, None] * width + column[None, :]
    kept = tl.load(u + within[:, None] * width + column[None, :])
    tl.store(out + at, made + kept, mask=row[:, None] < rows)


def launch(
    u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None, out: Tensor, tile: Tile
) -> None:
    """Add the layer to u into `out`; all of them are contiguous and begin at multiples of 16 bytes."""
    width, inner = weight.shape
    rows = u.numel() // width
    programs = -(-rows // tile.rows) * (width // tile.columns)
    tensors = (u, h, weight, weight if bias is None else bias, weight if branch is None else branch, out)
    constants = (tile.rows, tile.columns, tile.inner, bias is not None, branch is not None)
    kind = (h.dtype, None if bias is None else bias.dtype, inner, width, tile, *constants[3:])
    numbers = (rows, inner, width, *constants)
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    launch_cached(residual_kernel, programs, u, kind, tensors, numbers, **options)
