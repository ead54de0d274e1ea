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

from ..anatomy import Anatomy
from ..plain import as_module, residual
from .base import Operator, ReadingOperator
from .fitting import Moments, fit_rows
from .layers import Convolution, fit_norm, fresh_norm, own_activation, silence_norm
from .mixture import Mixtures
from .options import Need, ReadingOptions
from .site import Site


@dataclass(frozen=True, kw_only=True)
class ReducedBottleneck(ReadingOptions):
    """Borrowed reduction and expansion, no 3x3 between them (beyond the paper)."""

    name = "reduced_bottleneck"
    kinds = ("bottleneck",)

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return (
            Need("reduce", previous="conv1", next="conv1", like="conv1", mix=False, prefer="previous"),
            Need("expand", previous="conv3", next="conv3", like="conv3", mix=False, prefer="next"),
        )

    @property
    def module(self) -> type[Operator]:
        return ReducedBottleneckOperator


class ReducedBottleneckOperator(ReadingOperator):
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
        z = self.activation(self.conv1(x, made["reduce"]))
        return self.activation(x + self.norm(self.conv3(z, made["expand"])))

    @property
    def ends_in_activation(self) -> bool:
        return True

    def silence(self) -> bool:
        return silence_norm(self.norm)

    def regressors(self, x: Tensor) -> Tensor:
        return self.conv3.patches(self.activation(self.conv1(x, self.made()["reduce"])))

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


def fit_expansion(operator: ReadingOperator, norm: nn.Module, moments: Moments, held: Moments) -> float:
    """Fit the last 1x1 convolution of a bottleneck operator and the BatchNorm after it."""
    weights = list(operator.weights("expand").values())
    base = weights[0].flatten(1).double() if weights else torch.zeros_like(moments.cross())
    if "expand" not in operator.corrections:
        fit_norm(norm, base, moments, scale=fit_rows(moments, [base])[0])
        return 0.0
    weight, ridge = operator.fit_correction("expand", base, moments, held)
    fit_norm(norm, weight, moments)
    return ridge
