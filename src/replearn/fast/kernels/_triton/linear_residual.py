"""Triton kernel of linear + residual.

Matmuls are in half precision with float32 accumulation: over h, then over u for the branch, cast as it is loaded.
The residual u is added in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import launch as launch_kernel

if TYPE_CHECKING:
    from ..linear_residual import Tile

jit: Any = triton.jit


@jit
def matmul_tile(made, x, weight, row, column, inner, INNER: tl.constexpr, DTYPE: tl.constexpr):
    """made + a tile of x @ weight.T, with x cast to DTYPE as it is loaded."""
    k = tl.arange(0, INNER)
    left = x + row[:, None] * inner + k[None, :]
    right = weight + column[None, :] * inner + k[:, None]
    for start in range(0, inner, INNER):
        made = tl.dot(tl.load(left + start).to(DTYPE), tl.load(right + start), made)
    return made


@jit(do_not_specialize=["rows"])
def residual_kernel(
    u, h, weight, bias, branch, out, rows, inner, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, BIASED: tl.constexpr, BRANCHED: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = h.dtype.element_ty
    across = width // COLUMNS
    place = tl.program_id(0)  # neighbours share rows in L2
    row = (place // across) * ROWS + tl.arange(0, ROWS)
    column = (place % across) * COLUMNS + tl.arange(0, COLUMNS)
    within = tl.minimum(row, rows - 1)  # rows past the end are computed and not stored
    made = tl.zeros((ROWS, COLUMNS), tl.float32)
    made = matmul_tile(made, h, weight, within, column, inner, INNER, DTYPE)
    if BRANCHED:
        made = matmul_tile(made, u, branch, within, column, width, INNER, DTYPE)
    if BIASED:
        made += tl.load(bias + column)[None, :].to(tl.float32)
    at = row[:, None] * width + column[None, :]
    kept = tl.load(u + within[:, None] * width + column[None, :])
    tl.store(out + at, made + kept, mask=row[:, None] < rows)


def launch(
    u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None, out: Tensor, tile: Tile
) -> None:
    """u + linear(h) into `out`; all tensors are contiguous and aligned to 16 bytes."""
    width, inner = weight.shape
    rows = u.numel() // width
    programs = -(-rows // tile.rows) * (width // tile.columns)
    tensors = (u, h, weight, weight if bias is None else bias, weight if branch is None else branch, out)
    constants = (tile.rows, tile.columns, tile.inner, bias is not None, branch is not None)
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    launch_kernel(residual_kernel, programs, u, *tensors, rows, inner, width, *constants, **options)
