"""An operator's map under autocast: in float32 for a few tokens, in half precision for many.

Launches decide how long a few tokens take, and a product in float32 needs fewer: x is float32 there, so nothing is
cast. Many tokens keep the GPU busy, where such a product takes ten times as long as one in half precision. These
modules are only ever inside `Autocast`: a way to run, not to store.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# multiplications: a thousand tokens of width 384; in float32 they take an H200 as long as a launch takes Python
FEW = 1024 * 384 * 384


class StreamSum(nn.Module):
    """M u + v for the stream u in float32 and the branch v in half precision, M = W + I; v may be overwritten."""

    def __init__(self, stream: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        trained, one = stream.requires_grad, torch.eye(len(stream), dtype=stream.dtype, device=stream.device)
        self.stream_weight = nn.Parameter(stream.detach(), requires_grad=trained)  # M, transposed
        self.weight = nn.Parameter((stream.detach() - one).to(dtype), requires_grad=trained)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        width = self.weight.shape[0]
        # autocast leaves in-place products alone
        if u.numel() * width <= FEW and u.dtype is self.stream_weight.dtype:
            rows = v.type_as(u).reshape(-1, width)
            return rows.addmm_(u.reshape(-1, width), self.stream_weight).view_as(u)
        rows = v.reshape(-1, width)
        branch = rows.addmm_(u.to(v.dtype).reshape(-1, width), self.weight.to(v.dtype))
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
