"""Bottleneck: a bottleneck of borrowed 1x1 convolutions around a synthesized 3x3 one.

    W_c  = a_c norm(prev.conv2)_c + b_c norm(next.conv2)_c       (eq:bottleneck_mid_synthesis)
    z1   = relu(prev.conv1 * x)
    z2   = relu(W * z1)
    g(x) = relu(x + BN(next.conv3 * z2))                         (eq:bottleneck_forward)

Learnable: a, b per middle channel and the BatchNorm, 2B + 2C. Groups and dilation follow the
removed block. As many FLOPs as the block itself: it saves parameters and optimizer state, hardly
any time. `ReducedBottleneck` is the form that halves it.

Cost: the block's own shapes, so as many FLOPs; only parameters, gradients and optimizer state are
saved.
Fails: on a block of another kind than `bottleneck`; it never makes a step faster, so don't take it
for speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..blocks.anatomy import Anatomy
from ._base.layers import Convolution, fresh_norm, own_activation
from ._base.mixture import Mixtures
from ._base.operator import MixingOperator
from ._base.options import MixingOptions, Need
from ._base.plain import as_module, residual
from ._base.ridge import Moments
from ._base.site import Site
from .functional import norm_add_act
from .reduced_bottleneck import fit_expansion


@dataclass(frozen=True, kw_only=True)
class Bottleneck(MixingOptions):
    """Borrowed reduction and expansion around a synthesized convolution (the paper's)."""

    name = "bottleneck"
    kinds = ("bottleneck",)
    default_for = "bottleneck"

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return (
            Need("reduce", like="conv1", mix=False, prefer="previous"),
            Need("middle", like="conv2"),
            Need("expand", like="conv3", mix=False, prefer="next"),
        )


class BottleneckOperator(MixingOperator, options=Bottleneck):
    ends_in_activation = True

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.use(site, "reduce", like="conv1")
        self.use(site, "middle", like="conv2")
        self.use(site, "expand", like="conv3")
        self.make_coefficients(site, tuple(self._sources["middle"]), site.shape("conv2")[0])
        self.conv1 = Convolution(site.part("conv1"), site.device)
        self.conv2 = Convolution(site.part("conv2"), site.device)
        self.conv3 = Convolution(site.part("conv3"), site.device)
        self.norm = fresh_norm(site.part("norm"), site.device)
        self.activation = own_activation(site.part("activation"))

    def mixtures(self) -> Mixtures:
        middle = self.weighed("middle", "rows", normalise=True)
        return {"reduce": self.mixture("reduce"), "middle": middle, "expand": self.mixture("expand")}

    def compute(self, x: Tensor) -> Tensor:
        made = self.synthesized(x)
        z1 = self.activation(self.conv1(x, made["reduce"]))
        z2 = self.activation(self.conv2(z1, made["middle"]))
        return norm_add_act(self.conv3(z2, made["expand"]), self.norm, self.activation, x)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.start_rows("middle")

    def regressors(self, x: Tensor) -> Tensor:
        made = self.made()
        z1 = self.activation(self.conv1(x, made["reduce"]))
        return self.conv3.patches(self.activation(self.conv2(z1, made["middle"])))

    @torch.no_grad()
    def fit(self, moments: Moments, held: Moments) -> float:
        """Fit the expansion's correction, or without one the scale of each output channel."""
        return fit_expansion(self, self.norm, moments, held)

    def plain(self) -> nn.Module:
        made = self.made()
        branch = nn.Sequential(
            self.conv1.plain(made["reduce"], self._dtype),
            as_module(self.activation),
            self.conv2.plain(made["middle"], self._dtype),
            as_module(self.activation),
            self.conv3.plain(made["expand"], self._dtype, self.norm),
        )
        return residual(branch, self.activation)
