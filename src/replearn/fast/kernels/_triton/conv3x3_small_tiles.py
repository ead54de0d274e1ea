"""Tiles of the conv3x3_small kernels, by the larger of in and out channels; 3 is a first convolution of images.

They are fixed, since autotuning would fall into the capture of a step. `benchmarks/narrow_convolutions.py`
measures alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

CHANNELS = (16, 32)  # where the kernels are taken; with 64 they run too, but cuDNN's are as fast or faster
COLORS = 3  # channels of images, which may go in but never come out


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A forward pass, or the gradient of the input."""

    pixels: int  # columns that a program takes
    strip: int  # rows of the result that it walks down; two more are read
    pack: bool  # whether two pixels are computed at once, from one read of the four that they see
    num_warps: int  # 4 and 64 pixels: Hopper's wgmma; fewer of either: mma.sync
    num_stages: int  # 1: reads through L1; more: ahead of their use, past L1


@dataclass(frozen=True, kw_only=True)
class WeightTile:
    """The gradient of the weight."""

    pixels: int
    strip: int  # rows that a worker walks down before it goes to other columns
    roll: int  # rows that are read at once, each for all three rows of the window; 0: a row three times
    carry: bool = False  # with roll: whether dy's last two rows stay for the next step, and are not read again
    split: bool = False  # without roll: whether the three rows of the window are programs of their own
    workers: int  # at most: each writes a sum of its own, which are added afterwards
    num_warps: int
    num_stages: int


TILES = {
    3: Tile(pixels=64, strip=16, pack=True, num_warps=2, num_stages=1),
    16: Tile(pixels=64, strip=16, pack=False, num_warps=2, num_stages=3),
    32: Tile(pixels=128, strip=8, pack=False, num_warps=8, num_stages=3),
    64: Tile(pixels=128, strip=4, pack=False, num_warps=8, num_stages=1),
}
WEIGHT_TILES = {
    3: WeightTile(pixels=64, strip=32, roll=4, carry=True, workers=528, num_warps=4, num_stages=3),
    16: WeightTile(pixels=128, strip=32, roll=2, workers=264, num_warps=4, num_stages=3),
    32: WeightTile(pixels=64, strip=16, roll=2, workers=132, num_warps=8, num_stages=3),
    64: WeightTile(pixels=64, strip=8, roll=0, split=True, workers=44, num_warps=8, num_stages=3),
}


def has_tile(cin: int, cout: int) -> bool:
    """True if the kernels are used for a 3x3 convolution with these channels."""
    return cout in CHANNELS and (cin in CHANNELS or cin == COLORS)


def tile_for(cin: int, cout: int) -> Tile:
    return TILES[entry_of(cin, cout)]


def weight_tile_for(cin: int, cout: int) -> WeightTile:
    return WEIGHT_TILES[entry_of(cin, cout)]


def entry_of(cin: int, cout: int) -> int:
    return COLORS if COLORS in (cin, cout) else max(cin, cout)
