"""Merge an operator's sum with its input into the weight of its one linear map.

    x + W x + b   = (W + I) x + b
    x + K * x + b = (K + D) * x + b      D: the kernel that returns its input, 1 at each channel's own centre

Exact up to rounding, and saves one launch, one call and one read of x. The branch must be that map alone: a norm
before it (HeadWise, MLP) or an activation inside (bottlenecks) rules it out.
"""

import copy
from typing import Any

import torch
from torch import nn

from ..operators._base.plain import as_module, parts_of_residual
from ..surgery.replace import set_submodule


@torch.no_grad()
def merge_(fused: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Merge the residual sums in the deployed form of one operator; in place, except for the outermost.

    With a `dtype` of autocast, linear layers are left out: the residual stream would leave float32.
    """
    for path, part in list(fused.named_modules()):
        branch, activation = parts_of_residual(part) or (nn.Identity(), None)
        if not can_merge(branch) or (dtype is not None and type(branch) is nn.Linear):
            continue
        layer = merged(branch)
        if activation is not None:
            layer = nn.Sequential(layer, as_module(activation)).eval()
        if not path:
            return layer
        set_submodule(fused, path, layer)
    return fused


def merged(layer: nn.Module) -> nn.Module:
    """A copy of the layer that adds its input to its output."""
    copied = copy.deepcopy(layer)
    weight = copied.get_parameter("weight").data  # in its own memory order
    rows = torch.arange(len(weight), device=weight.device)
    centre: list[Any] = [size // 2 for size in weight.shape[2:]]
    # a channel's own column is counted from the first of its group
    weight[(rows, rows % weight.shape[1], *centre)] += 1
    return copied


def can_merge(layer: nn.Module) -> bool:
    """True for a linear layer or convolution whose output has the shape of its input."""
    found: Any = layer
    if type(layer) is nn.Linear:
        return bool(found.in_features == found.out_features)
    if type(layer) is not nn.Conv2d or found.in_channels != found.out_channels or set(found.stride) != {1}:
        return False
    padding = found._reversed_padding_repeated_twice[::-2]  # in numbers, also where it says 'same'
    sizes = zip(padding, found.kernel_size, found.dilation, strict=True)
    return all(size % 2 and 2 * pad == dilation * (size - 1) for pad, size, dilation in sizes)
