"""How the kernels of a stem cut their work: chosen here and not searched for when a model runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Pixels of the result that a program makes."""

    rows: int
    num_warps: int = 4
    num_stages: int = 3


CONVOLVING = Tile(rows=128, num_warps=8)
POOLING = Tile(rows=8)
