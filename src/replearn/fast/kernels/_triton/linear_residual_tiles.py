"""How the kernel of residual layers cuts its work, by the rows that it has.

Chosen here and not searched for when a model runs, as those of narrow convolutions are;
`benchmarks/residual_linear.py` measures the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

WIDTH = 64  # what inner and outer widths are multiples of: no tile is wider than they allow


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A program's part of the result, and how far along the inner width it reads at a time."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int  # of reads that are on their way while the tensor cores multiply


# few rows: many programs, each of them short
FEW = Tile(rows=32, columns=32, inner=128, num_warps=4, num_stages=4)
FEW_BRANCHED = Tile(rows=16, columns=64, inner=128, num_warps=4, num_stages=4)
TALL = Tile(rows=128, columns=64, inner=64, num_warps=4, num_stages=3)
WIDE = Tile(rows=64, columns=128, inner=64, num_warps=4, num_stages=4)  # rounds less of u for each column


def tile_for(rows: int, inner: int, width: int, *, branched: bool) -> Tile:
    """The tile for a layer of these widths, which are multiples of 64."""
    if rows <= 1024:
        tile = FEW_BRANCHED if branched else FEW
        even = inner % tile.inner == 0 and (not branched or width % tile.inner == 0)
        return tile if even else replace(tile, inner=WIDTH)
    # a long layer of one or two tiles for each multiprocessor fills them better if those are wide
    wide = branched or (inner > 512 and rows <= 8192)
    return WIDE if wide and width % WIDE.columns == 0 else TALL
