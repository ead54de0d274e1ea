"""Projection: a token-wise linear map mixed from the neighbours' attention output projections.

    W    = a prev.proj + b next.proj, and the bias likewise      (eq:vit_projection_synthesis)
    g(X) = X + X W^T + bias                                      (eq:vit_basic_forward)

Learnable: 2 scalars, or 1 if they are shared. No normalisation, no LayerNorm.

Cost: one d x d matrix a token, where a block has twelve and the attention: about 1/13 of a ViT block's FLOPs.
Fails: where the attention's output projection is not square (WholeBlock and MLP work there); on a
trained model its span alone explains almost nothing of a block: add a correction.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..blocks.anatomy import Anatomy
from ..errors import ReplearnError
from ._base.layers import plain_linear
from ._base.mixture import Mixtures
from ._base.operator import MixingOperator
from ._base.options import MixingOptions, Need
from ._base.plain import residual
from ._base.site import Site


@dataclass(frozen=True, kw_only=True)
class Projection(MixingOptions):
    """A linear map mixed from the neighbours' output projections (the paper's basic ViT form)."""

    name = "projection"
    kinds = ("transformer",)
    default_for = "transformer"

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return (Need("proj"),)


class ProjectionOperator(MixingOperator, options=Projection):
    last = "proj"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        require_square(site)
        self.use(site, "proj", bias=True)
        self.make_coefficients(site, tuple(self._sources["proj"]), 1)

    def mixtures(self) -> Mixtures:
        return {
            "proj": self.weighed("proj", "all"),
            "proj_bias": self.bias_mixture("proj", **self.coefficients_of("proj")),
        }

    def compute(self, x: Tensor) -> Tensor:
        weights = self.synthesized(x)
        return x + linear(x, weights["proj"], weights.get("proj_bias"))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.start_coefficients({side: torch.ones_like(self.coefficient(side)) for side in self._sources["proj"]})

    def regressors(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1])

    def plain(self) -> nn.Module:
        weights = self.synthesized_in_full()
        return residual(plain_linear(weights["proj"], weights.get("proj_bias"), self.stored_dtype))


def require_square(site: Site) -> None:
    """A token of width d must come out with width d."""
    shape = site.shape("proj")
    if shape[0] != shape[1]:
        raise ReplearnError(
            f"{site.target.name}: its attention output projection is {shape[0]}x{shape[1]}, not square, so it "
            "can't be applied to the tokens. Use operators.WholeBlock() or operators.MLP() for this model."
        )
