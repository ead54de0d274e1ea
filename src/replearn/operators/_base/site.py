"""Where an operator is built: the removed block and its neighbours, as the plan names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...blocks.anatomy import Anatomy, Part, resolve
from ...errors import ReplearnError
from .options import Options, ReadingOptions
from .synthesis import Source

if TYPE_CHECKING:
    from ...planning.data import Target


@dataclass(frozen=True, eq=False)
class Site:
    """Where an operator is built: the target of the plan, and the model with its block and neighbours.

    `device` is `meta` while planning, so that counting parameters costs nothing.
    """

    target: Target
    device: torch.device
    model: nn.Module

    @property
    def block(self) -> nn.Module:
        return self.model.get_submodule(self.target.name)

    def neighbour(self, side: str) -> nn.Module:
        return self.model.get_submodule(getattr(self.target, side))

    @property
    def options(self) -> Options:
        return self.target.operator

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the block's weights."""
        floating = (p.dtype for p in self.block.parameters() if p.dtype.is_floating_point)
        return next(floating, torch.float32)

    @property
    def upcast_dtype(self) -> torch.dtype:
        """The dtype of coefficients and gains: float32, or float64 for a float64 model."""
        return torch.promote_types(self.dtype, torch.float32)

    def part(self, role: str) -> Any:
        """The removed block's own part, of which the operator takes shape and settings but not the weights."""
        return resolve(self.block, self._part(role).path)

    def sources(self, role: str) -> dict[str, Source]:
        """The sources of a role by side, previous first."""
        options = self.options
        stop_gradient = options.stop_gradient if isinstance(options, ReadingOptions) else True
        return {
            side: self._source(side, read.part, stop_gradient)
            for side in ("previous", "next")
            for read in self.target.reads
            if read.role == role and read.side == side
        }

    def source(self, role: str) -> Source:
        """The single source of a role that is read from one side."""
        return next(iter(self.sources(role).values()))

    def _source(self, side: str, part: Part, stop_gradient: bool) -> Source:
        own, names = self.target.name.split("."), getattr(self.target, side).split(".")
        shared = next(i for i, (one, other) in enumerate(zip(own, names, strict=False)) if one != other)
        owner = self.model.get_submodule(".".join(names[:shared]))
        return Source(self.neighbour(side), part, stop_gradient, owner, tuple(names[shared:]))

    def shape(self, role: str) -> tuple[int, ...]:
        """The shape, as (out, in, ...), of the removed block's weight in this role."""
        return stored_shape(self.part(role).weight, self._part(role))

    def _part(self, role: str) -> Part:
        return part_of(self.target.anatomy, role, f"{self.options.name} needs")


def part_of(anatomy: Anatomy, role: str, reader: str) -> Part:
    if role not in anatomy.parts:
        raise ReplearnError(f"this {anatomy.family} block has no {role}, which {reader}")
    return anatomy.parts[role]


def stored_shape(tensor: Tensor, part: Part) -> tuple[int, ...]:
    """The shape of a part's weight as (out, in, ...)."""
    shape = tuple(tensor.shape)[:: -1 if part.transposed else 1]
    return shape if part.rows is None else (part.rows[1] - part.rows[0], *shape[1:])
