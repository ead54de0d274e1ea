"""How the kernels of short attention cut their work, by the tokens that a tile holds.

Chosen here and not searched for when a model runs, as those of narrow convolutions are;
`benchmarks/short_attention.py` measures the alternatives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

WIDTHS = (16, 32, 64, 128)  # of a head
MOST_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A pass over whole heads: one after another where there are several, all of their reads ahead."""

    heads: int  # of one sequence, that a program takes; at most, and a divisor of those there are
    num_warps: int
    registers: int | None = None  # of a thread, at most; the compiler takes what it likes if not given


# by rows, for heads up to 64 wide; those of 128 take twice the warps
FORWARD = {
    16: Tile(heads=2, num_warps=1),  # a warp alone waits for no other: no barriers, and sums of rows by shuffles
    32: Tile(heads=1, num_warps=1, registers=128),
    64: Tile(heads=3, num_warps=4),  # fewer warps would spill registers
}
BACKWARD = {
    16: Tile(heads=2, num_warps=1),
    32: Tile(heads=1, num_warps=1, registers=168),  # 12 programs on a multiprocessor, not 11, and still no spills
    64: Tile(heads=1, num_warps=4),
}


def tile_for(tiles: Mapping[int, Tile], tokens: int, width: int) -> Tile:
    tile = tiles[rows_for(tokens)]
    return replace(tile, num_warps=2 * tile.num_warps) if width > 64 else tile


def rows_for(tokens: int) -> int:
    """The rows of the tile that holds so many tokens: a tensor core multiplies 16 at a time."""
    return 16 if tokens <= 16 else 32 if tokens <= 32 else 64
