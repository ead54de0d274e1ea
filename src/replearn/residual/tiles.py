"""How the kernel of residual layers cuts its work, by the rows that it has.

Chosen here and not searched for when a model runs, as those of narrow convolutions are;
`benchmarks/residual_linear.py` measures the alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

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
FEW = Tile(rows=32, columns=32, inner=64, num_warps=4, num_stages=4)
SOME = Tile(rows=64, columns=64, inner=64, num_warps=4, num_stages=4)
MANY = Tile(rows=128, columns=128, inner=64, num_warps=8, num_stages=3)


def tile_for(rows: int, columns: int) -> Tile:
    if rows <= 1024:
        return FEW
    return MANY if columns % MANY.columns == 0 and rows > 4096 else SOME
