"""No weights: a learnable map that reads no neighbour. The paper's control.

    g(x) = x + s_c x + t_c

Learnable: s and t, 2C; both start at zero, so that the operator starts as the identity.

Cost: nothing but the residual path: 2C multiply-adds a position.
Fails: on a block of kind `any`, whose width is not known.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..blocks.anatomy import Anatomy
from ._base.layers import plain_linear
from ._base.operator import Operator
from ._base.options import Need, Options
from ._base.plain import affine
from ._base.ridge import Moments, fit_rows
from ._base.site import Site


@dataclass(frozen=True, kw_only=True)
class NoWeights(Options):
    """A scale and a shift per channel that read no neighbour (the paper's control)."""

    name = "no_weights"
    kinds = ("basic", "bottleneck", "transformer")

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return ()


class NoWeightsOperator(Operator, options=NoWeights):
    def __init__(self, site: Site) -> None:
        super().__init__(site)
        kind = site.target.anatomy.kind
        last = {"basic": "conv2", "bottleneck": "conv3", "transformer": "proj"}[kind]
        width = site.shape(last)[0]
        shape = (width,) if kind == "transformer" else (width, 1, 1)
        self.scale = nn.Parameter(torch.zeros(shape, device=site.device, dtype=site.upcast_dtype))
        self.shift = nn.Parameter(torch.zeros_like(self.scale))

    def num_deployed(self) -> int:
        width = self.scale.numel()
        return width * width + width if self.target.anatomy.family == "torch_transformer" else 2 * width

    def compute(self, x: Tensor) -> Tensor:
        if x.is_nested:  # nn.TransformerEncoder packs padded batches; nested tensors have no product with vectors
            return linear(x, torch.diag(1 + self.scale).to(x.dtype), self.shift.to(x.dtype))
        return x + self.scale.to(x.dtype) * x + self.shift.to(x.dtype)

    def coefficients(self) -> list[nn.Parameter]:
        return [self.scale, self.shift]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.scale.zero_()
        self.shift.zero_()

    def zero_branch(self) -> bool:
        self.reset_parameters()
        return True

    def regressors(self, x: Tensor) -> Tensor:
        last = x if self.scale.dim() == 1 else x.movedim(1, -1)
        return last.reshape(-1, last.shape[-1])

    @torch.no_grad()
    def fit(self, moments: Moments, held_out: Moments) -> float:
        eye = torch.eye(len(moments.mean_x[0]), dtype=torch.float64, device=self.scale.device)
        scale = fit_rows(moments, [eye])[0]
        self.scale.copy_(scale.view(self.scale.shape))
        self.shift.copy_((moments.mean_y[0] - scale * moments.mean_x[0]).view(self.shift.shape))
        return 0.0

    def plain(self) -> nn.Module:
        if self.target.anatomy.family == "torch_transformer":  # the only one that gets nested tensors
            return plain_linear(torch.diag(1 + self.scale), self.shift, self.stored_dtype)
        return affine((1 + self.scale).to(self.stored_dtype), self.shift.to(self.stored_dtype))
