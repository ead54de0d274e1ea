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

import torch
from torch import Tensor, nn

from ..blocks.anatomy import Anatomy
from ..errors import ReplearnError
from ._base.layers import Convolution, fit_norm, fresh_norm, own_activation
from ._base.least_squares import fit_rows
from ._base.mixture import Mixtures
from ._base.operator import FINE_RIDGES, Inner, ReadingOperator
from ._base.options import Need, ReadingOptions
from ._base.plain import as_module, residual
from ._base.ridge import Moments, solve
from ._base.site import Site
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


class ReducedBottleneckOperator(ReadingOperator, options=ReducedBottleneck):
    ends_in_activation = True

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.use(site, "reduce", like="conv1")
        self.use(site, "expand", like="conv3")
        self.conv1 = Convolution(site.part("conv1"), site.device)
        self.conv3 = Convolution(site.part("conv3"), site.device)
        self.norm = fresh_norm(site.part("norm"), site.device)
        self.activation = own_activation(site.part("activation"))

    def mixtures(self) -> Mixtures:
        return {"reduce": self.mixture("reduce"), "expand": self.mixture("expand")}

    def compute(self, x: Tensor) -> Tensor:
        made = self.synthesized(x)
        reduction, expansion = (self.conv1, made["reduce"]), (self.conv3, made["expand"])
        return reduced_bottleneck(x, reduction, expansion, self.norm, self.activation)

    def regressors(self, x: Tensor) -> Tensor:
        return self.conv3.patches(self.activation(self.conv1(x, self.made()["reduce"])))

    def inner(self) -> Inner | None:
        """The reduction, fitted to the directions that matter most."""
        if "reduce" not in self.corrections or self._correction("reduce").rank or not self.conv1.ordinary:
            return None
        return self.conv1.patches, self._fit_directions

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

    @torch.no_grad()
    def fit(self, moments: Moments, held: Moments) -> float:
        """Fit the expansion's correction, or without one the scale of each output channel."""
        return fit_expansion(self, self.norm, moments, held)

    def plain(self) -> nn.Module:
        made = self.made()
        branch = nn.Sequential(
            self.conv1.plain(made["reduce"], self._dtype),
            as_module(self.activation),
            self.conv3.plain(made["expand"], self._dtype, self.norm),
        )
        return residual(branch, self.activation)


@torch.no_grad()
def fit_expansion(operator: ReadingOperator, norm: nn.Module, moments: Moments, held: Moments) -> float:
    """Fit the last 1x1 convolution of a bottleneck operator and the BatchNorm after it.

    The borrowed kernel's rows get the scale that suits best, which the BatchNorm applies; a correction comes
    on top.
    """
    base = operator.borrowed("expand", moments.mixed[0].T)
    scale = fit_rows(moments, [base])[0]
    if "expand" not in operator.corrections:
        fit_norm(norm, base, moments, scale=scale)
        return 0.0
    least = 1e-2 * scale.abs().max().clamp_min(1e-6)  # a row must not be divided by nothing
    scale = torch.where(scale.abs() < least, least, scale)
    weight, ridge = operator.fit_correction("expand", scale[:, None] * base, moments, held)
    operator._correction("expand").scale(1 / scale)
    fit_norm(norm, weight / scale[:, None], moments, scale=scale)
    return ridge
