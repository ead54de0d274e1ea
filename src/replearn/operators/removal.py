"""Removal: nothing in the block's place. The floor that every operator is measured against.

g(x) = x
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..anatomy import Anatomy
from .base import Operator
from .options import Need, Options


@dataclass(frozen=True, kw_only=True)
class Removal(Options):
    """Nothing in the block's place: the floor."""

    name = "removal"
    kinds = ("basic", "bottleneck", "transformer", "any")

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return ()

    @property
    def module(self) -> type[Operator]:
        return RemovalOperator


class RemovalOperator(Operator):
    def compute(self, x: Tensor) -> Tensor:
        return x

    def plain(self) -> nn.Module:
        return nn.Identity()
