"""How the kernels of a stem cut their work: chosen here and not searched for when a model runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Pixels of the result that a program makes."""

    rows: int
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True)
class Walk:
    """How a program walks down an image that it convolves and pools."""

    lanes: int  # pixels of a pooled line that it makes, and one more
    steps: int  # pooled lines that it makes
    num_warps: int = 4
    num_stages: int = 4

    def programs(self, images: int, below: int, beside: int) -> int:
        """How many walk over pooled images of this size, for each block of channels."""
        return images * -(-below // self.steps) * -(-beside // (self.lanes - 1))


WALKING = Walk(lanes=64, steps=14)
LEAST = 256  # programs: fewer leave a GPU idle, and two kernels are faster that cut the work finer
CONVOLVING = Tile(rows=128, num_warps=8)
POOLING = Tile(rows=8)
