"""An operator's map under autocast: in float32 for a few tokens, in half precision for many.

Launches decide how long a few tokens take, and a product in float32 needs fewer: x is float32 there, so nothing is
cast. Many tokens keep the GPU busy, where such a product takes ten times as long as one in half precision. Both
are only ever inside `Autocast`: a way to run, not to store.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# multiplications: a thousand tokens of width 384; in float32 they take an H200 as long as a launch takes Python
FEW = 1024 * 384 * 384


def stream_sum(u: Tensor, v: Tensor, wide: Tensor, weight: Tensor) -> Tensor:
    """M u + v for the stream u in float32 and the branch v in half precision; v may be overwritten.

    `wide` is M = W + I in float32 and `weight` W in half precision, both transposed.
    """
    width = wide.shape[0]
    # autocast leaves in-place products alone
    if u.numel() * width <= FEW and u.dtype is wide.dtype:
        return v.type_as(u).view(-1, width).addmm_(u.reshape(-1, width), wide).view_as(u)
    branch = v.view(-1, width).addmm_(u.type_as(v).reshape(-1, width), weight.type_as(v))
    return u + branch.view_as(u)


class ResidualSum(nn.Module):
    """x + W x + b for x in float32, or in half precision like the product."""

    def __init__(self, layer: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        trained, bias = layer.weight.requires_grad, layer.bias
        self.wide = nn.Parameter(layer.weight.detach().t().contiguous(), requires_grad=trained)
        self.weight = nn.Parameter(layer.weight.detach().to(dtype), requires_grad=trained)
        self.wide_bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=trained)
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(dtype), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        width = self.weight.shape[0]
        if x.numel() * width <= FEW and x.dtype is self.wide.dtype:
            total = x.clone() if self.wide_bias is None else x + self.wide_bias
            return total.reshape(-1, width).addmm_(x.reshape(-1, width), self.wide).view_as(x)
        return x + F.linear(x, self.weight, self.bias)
