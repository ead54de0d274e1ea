"""Tiles of the attention_short kernels, by rows. `benchmarks/short_attention.py` measures alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

WIDTHS = (16, 32, 64, 128)  # of a head
MOST_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Launch parameters of a program, which computes whole heads."""

    heads: int  # per program, at most; lowered to a divisor of the number of heads
    num_warps: int
    registers: int | None = None  # maxnreg


# by rows, for head dims up to 64; 128 takes twice the warps
FORWARD = {
    16: Tile(heads=2, num_warps=1),  # one warp needs no barriers
    32: Tile(heads=1, num_warps=1, registers=128),
    64: Tile(heads=3, num_warps=4),  # fewer warps would spill registers
}
BACKWARD = {
    16: Tile(heads=2, num_warps=1),
    32: Tile(heads=1, num_warps=1, registers=168),  # 12 programs per SM without spills
    64: Tile(heads=1, num_warps=4),
}


def tile_for(tiles: Mapping[int, Tile], tokens: int, width: int) -> Tile:
    tile = tiles[rows_for(tokens)]
    return replace(tile, num_warps=2 * tile.num_warps) if width > 64 else tile


def rows_for(tokens: int) -> int:
    """Tokens rounded up to a tile size of tl.dot."""
    return 16 if tokens <= 16 else 32 if tokens <= 32 else 64
