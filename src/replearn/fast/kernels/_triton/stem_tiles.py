"""Tiles of the stem kernel. `benchmarks/stem.py` measures alternatives."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Output tile of a program, which loops over pooled lines."""

    lanes: int  # pixels of a pooled line, and one more
    steps: int  # pooled lines
    num_warps: int = 4
    num_stages: int = 4

    def programs(self, images: int, down: int, across: int) -> int:
        """Programs for pooled images of this size, for each block of channels."""
        return images * -(-down // self.steps) * -(-across // (self.lanes - 1))


WALK = Walk(lanes=64, steps=14)
MIN_PROGRAMS = 256  # fewer leave a GPU idle: programs then take shorter walks


def walk_for(images: int, down: int, across: int) -> Walk:
    """The longest walk that gives a GPU enough programs."""
    walks = [replace(WALK, steps=steps) for steps in (WALK.steps, 7, 4, 2)]
    return next((walk for walk in walks if walk.programs(images, down, across) >= MIN_PROGRAMS), walks[-1])
