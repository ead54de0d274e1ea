"""BasicBlock: one synthesized 3x3 convolution in place of two.

    W_c  = a_c norm(prev.conv2)_c + b_c norm(next.conv1)_c       (eq:basic_kernel_synthesis)
    g(x) = relu(x + BN(W * x))                                   (eq:basic_forward)

Learnable: a, b and the BatchNorm, 4C. Half of the block's FLOPs.

Cost: one 3x3 convolution instead of two: half of the block's FLOPs, and synthesis reads 2 kernels a
step.
Fails: on a block of another kind than `basic`; `sources='none'` without a correction has no weight
left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..blocks.anatomy import Anatomy
from ._base.layers import Convolution, fit_norm, fresh_norm, own_activation
from ._base.mixture import Mixtures
from ._base.operator import MixingOperator
from ._base.options import MixingOptions, Need
from ._base.plain import residual
from ._base.ridge import Moments
from ._base.site import Site
from .functional import norm_add_act


@dataclass(frozen=True, kw_only=True)
class Basic(MixingOptions):
    """One synthesized convolution with BatchNorm in place of a BasicBlock (the paper's)."""

    name = "basic"
    kinds = ("basic",)
    default_for = "basic"

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return (Need("kernel", previous="conv2", next="conv1", like="conv2"),)


class BasicOperator(MixingOperator, options=Basic):
    ends_in_activation = True

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.use(site, "kernel", like="conv2")
        self.make_coefficients(site, tuple(self._sources["kernel"]), site.shape("conv2")[0])
        self.conv = Convolution(site.part("conv2"), site.device)
        self.norm = fresh_norm(site.part("norm"), site.device)
        self.activation = own_activation(site.part("activation"))

    def mixtures(self) -> Mixtures:
        return {"kernel": self.weighed("kernel", "rows", normalise=True)}

    def compute(self, x: Tensor) -> Tensor:
        return norm_add_act(self.conv(x, self.synthesized(x)["kernel"]), self.norm, self.activation, x)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.start_rows("kernel")

    def regressors(self, x: Tensor) -> Tensor:
        return self.conv.patches(x)

    @torch.no_grad()
    def fit(self, moments: Moments, held: Moments) -> float:
        """Channel coefficients first, then the correction, then the BatchNorm that leaves both as they are."""
        base, _ = self.fit_factors("kernel", moments)
        weight, ridge = self.fit_correction("kernel", base, moments, held)
        fit_norm(self.norm, weight, moments)
        return ridge

    def plain(self) -> nn.Module:
        return residual(self.conv.plain(self.made()["kernel"], self._dtype, self.norm), self.activation)
