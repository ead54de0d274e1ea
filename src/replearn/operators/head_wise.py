"""Head-wise: the projection with normalised rows and one coefficient per head.

    W_{:,C_h} = a_h norm(prev.proj)_{:,C_h} + b_h norm(next.proj)_{:,C_h}   (eq:vit_headwise_synthesis)
    bias      = (prev.bias + next.bias) / 2                                 (eq:vit_bias_average)
    g(X)      = X + d^-1/2 LN_prev1(X) W^T + bias                           (eq:vit_head_forward)

Learnable: 2H. Rows are normalised whole, before the columns are scaled. The printed deploy
equation scales the bias by d^-1/2 too; the forward does not, and the forward is what is deployed.
The bias has a constant factor, 1 in the paper, which a fit to a trained block may change.

Cost: one d x d matrix a token and a borrowed LayerNorm.
Fails: where the projection is not square, its columns can't be split among the heads, or
`sources='none'`: it reads a neighbour's LayerNorm.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..blocks.anatomy import Anatomy
from ..errors import ReplearnError
from ._base.layers import BorrowedNorm, plain_linear
from ._base.mixture import Mixtures
from ._base.operator import MixingOperator
from ._base.options import MixingOptions, Need
from ._base.plain import residual
from ._base.site import Site
from ._base.synthesis import row_norms, unit_rows
from .projection import require_square


@dataclass(frozen=True, kw_only=True)
class HeadWise(MixingOptions):
    """A projection with one pair of coefficients per attention head (the paper's larger ViT form)."""

    name = "head_wise"
    kinds = ("transformer",)

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        if not self.sides:
            raise ReplearnError(
                "HeadWise reads a neighbour's LayerNorm, so sources can't be 'none'. "
                "Use Projection(sources='none', correction='full') for a map that reads nothing."
            )
        return Need("proj"), Need("norm1", mix=False)


class HeadWiseOperator(MixingOperator, options=HeadWise):
    gain: Tensor  # of the bias
    last = "proj"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        require_square(site)
        width, heads = site.shape("proj")[1], site.target.anatomy.num_heads
        if heads < 1 or width % heads:
            raise ReplearnError(
                f"{site.target.name}: {width} columns can't be split among {heads} heads. "
                "Use operators.Projection()."
            )
        self._scale = width**-0.5
        self.use(site, "proj", bias=True)
        self.make_coefficients(site, tuple(self._sources["proj"]), heads)
        self.norm1 = BorrowedNorm(site.source("norm1"), site.device)
        self.make_gain(site)

    def mixtures(self) -> Mixtures:
        """The weight includes the factor d^-1/2, the bias does not."""
        weight = self.weighed("proj", "heads", normalise=True, scale=self._scale)
        return {"proj": weight, "proj_bias": self.mean_bias_mixture("proj", self.gain)}

    def compute(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        weights = self.synthesized(normed)
        return x + linear(normed, weights["proj"], weights.get("proj_bias"))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start each head at the least-squares fit of its own source."""
        super().reset_parameters()
        scales = {}
        for side, weight in self.source_weights("proj").items():
            lengths = row_norms(weight)
            heads = self.coefficient(side).shape[0]
            unit = unit_rows(weight).view(weight.shape[0], heads, -1)
            energy = unit.square().sum(dim=2)
            scales[side] = (energy * lengths).sum(dim=0) / energy.sum(dim=0).clamp_min(1e-30)
        self.start_coefficients(scales)

    def regressors(self, x: Tensor) -> Tensor:
        return self.norm1(x).reshape(-1, x.shape[-1])

    def plain(self) -> nn.Module:
        weights = self.synthesized_in_full()
        linear = plain_linear(weights["proj"], weights.get("proj_bias"), self.stored_dtype)
        return residual(nn.Sequential(self.norm1.plain(), linear))
