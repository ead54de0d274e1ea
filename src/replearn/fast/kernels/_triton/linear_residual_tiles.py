"""Tiles of the linear_residual kernel, by rows. `benchmarks/residual_linear.py` measures alternatives."""

from __future__ import annotations

from dataclasses import dataclass, replace

WIDTH = 64  # inner and outer widths are multiples of it


@dataclass(frozen=True, kw_only=True)
class Tile:
    """BLOCK_M, BLOCK_N and BLOCK_K, and launch options."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


# few rows: many short programs
FEW = Tile(rows=32, columns=32, inner=128, num_warps=4, num_stages=4)
FEW_BRANCHED = Tile(rows=16, columns=64, inner=128, num_warps=4, num_stages=4)
TALL = Tile(rows=128, columns=64, inner=64, num_warps=4, num_stages=3)
WIDE = Tile(rows=64, columns=128, inner=64, num_warps=4, num_stages=4)  # casts u less often


def tile_for(rows: int, inner: int, width: int, *, branched: bool) -> Tile:
    """The tile for a layer of these widths, which are multiples of 64."""
    if rows <= 1024:
        tile = FEW_BRANCHED if branched else FEW
        even = inner % tile.inner == 0 and (not branched or width % tile.inner == 0)
        return tile if even else replace(tile, inner=WIDTH)
    # one or two tiles per SM: wide ones fill them better
    wide = branched or (inner > 512 and rows <= 8192)
    return WIDE if wide and width % WIDE.columns == 0 else TALL
