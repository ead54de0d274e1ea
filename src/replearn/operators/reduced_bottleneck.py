"""Reduced bottleneck: the borrowed 1x1 convolutions alone. Beyond the paper.

    g(x) = relu(x + BN(next.conv3 * relu(prev.conv1 * x)))

Learnable: the BatchNorm, 2C. About half of the block's FLOPs: the printed bottleneck operator
costs as much as the block it replaces, this one saves time too.

Cost: two 1x1 convolutions: about half of the block's FLOPs.
Fails: on a block of another kind than `bottleneck`; nothing in it looks at a pixel's neighbours, so
a stack of them loses receptive field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..blocks.anatomy import Anatomy
from ..errors import ReplearnError
from ._base.chain import ChainOperator
from ._base.operator import FINE_RIDGES, Inner
from ._base.options import Need, ReadingOptions
from ._base.ridge import Moments, solve
from .functional import reduced_bottleneck


@dataclass(frozen=True, kw_only=True)
class ReducedBottleneck(ReadingOptions):
    """Borrowed reduction and expansion, no 3x3 between them (beyond the paper)."""

    name = "reduced_bottleneck"
    kinds = ("bottleneck",)

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return (
            Need("reduce", like="conv1", mix=False, prefer="previous"),
            Need("expand", like="conv3", mix=False, prefer="next"),
        )


class ReducedBottleneckOperator(ChainOperator, options=ReducedBottleneck):
    chain: ClassVar = {"reduce": "conv1", "expand": "conv3"}

    def compute(self, x: Tensor) -> Tensor:
        made = self.synthesized(x)
        reduction, expansion = ((self.convolution(role), made[role]) for role in ("reduce", "expand"))
        return reduced_bottleneck(x, reduction, expansion, self.norm, self.activation)

    def inner(self) -> Inner | None:
        """The reduction, fitted to the directions that matter most."""
        reduce = self.convolution("reduce")
        free = "reduce" in self.corrections and self._correction("reduce").rank is None and reduce.ordinary
        return (reduce.patches, self._fit_directions) if free else None

    @torch.no_grad()
    def _fit_directions(self, moments: Moments, held: Moments) -> None:
        """Reduced-rank regression of the branch: relu(d x) and relu(-d x) together carry d x through the relu."""
        correction = self._correction("reduce")
        base = self.borrowed("reduce", correction.weight().flatten(1).double())
        half = max(1, len(base) // 2)
        nothing = torch.zeros(len(moments.mean_y[0]), base.shape[1], dtype=base.dtype, device=base.device)
        solution = solve(moments, held, nothing[None], rank=min(half, *nothing.shape), ridges=FINE_RIDGES)
        if solution.factors is None:
            raise ReplearnError(f"{self.target.name}: no directions were found.")
        found = solution.factors[1][0]
        rows = torch.zeros_like(base)
        rows[: len(found)] = found[: len(base)]
        rows[half : half + len(found)] = -found[: len(base) - half]
        correction.set(rows - base)
