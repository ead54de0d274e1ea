"""Removal: nothing in the block's place. The floor that every operator is measured against.

    g(x) = x

Cost: nothing.
Fails: on a block of unknown kind that says it returns a tuple: the bare input would be returned in
its place.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import Tensor, nn

from ..anatomy import Anatomy
from ..errors import ReplearnError
from .base import Operator
from .options import Need, Options
from .site import Site


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
    def __init__(self, site: Site) -> None:
        super().__init__(site)
        anatomy = site.target.anatomy
        annotation = inspect.signature(site.block.forward).return_annotation
        if anatomy.kind == "any" and anatomy.returns == "tensor" and "tuple" in str(annotation).lower():
            raise ReplearnError(
                f"{type(site.block).__qualname__}.forward says that it returns {annotation}, and Removal would "
                "return the bare input. Use WholeBlock(), or give the class a replearn_anatomy with "
                "returns='tuple'."
            )

    def compute(self, x: Tensor) -> Tensor:
        return x

    def plain(self) -> nn.Module:
        return nn.Identity()
