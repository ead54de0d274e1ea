"""No weights: a learnable map that reads no neighbour. The paper's control.

    g(x) = x + s_c x + t_c

Learnable: s and t, 2C; both start at zero, so that the operator starts as the identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..anatomy import Anatomy
from ..plain import affine
from .base import Operator
from .options import Need, Options
from .site import Site


@dataclass(frozen=True, kw_only=True)
class NoWeights(Options):
    """A scale and a shift per channel that read no neighbour (the paper's control)."""

    name = "no_weights"
    kinds = ("basic", "bottleneck", "transformer")

    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        return ()

    @property
    def module(self) -> type[Operator]:
        return NoWeightsOperator


class NoWeightsOperator(Operator):
    def __init__(self, site: Site) -> None:
        super().__init__(site)
        kind = site.target.anatomy.kind
        last = {"basic": "conv2", "bottleneck": "conv3", "transformer": "proj"}[kind]
        width = site.shape(last)[0]
        shape = (width,) if kind == "transformer" else (width, 1, 1)
        dtype = torch.float64 if site.dtype is torch.float64 else torch.float32
        self._dtype = site.dtype
        self.scale = nn.Parameter(torch.zeros(shape, device=site.device, dtype=dtype))
        self.shift = nn.Parameter(torch.zeros(shape, device=site.device, dtype=dtype))

    def compute(self, x: Tensor) -> Tensor:
        return x + self.scale.to(x.dtype) * x + self.shift.to(x.dtype)

    def coefficients(self) -> list[nn.Parameter]:
        return [self.scale, self.shift]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.scale.zero_()
        self.shift.zero_()

    def plain(self) -> nn.Module:
        return affine((1 + self.scale).to(self._dtype), self.shift.to(self._dtype))
