"""Merge an operator's sum with its input into the weight of its one linear map.

    x + W x + b   = (W + I) x + b
    x + K * x + b = (K + D) * x + b      D: the kernel that returns its input, 1 at each channel's own centre

Exact but for rounding, and one launch, one call and one read of x less. Only a branch that is nothing but that map
can take the sum up: a norm before it (HeadWise, MLP) or an activation inside (bottlenecks) keeps it outside.
"""

import copy
from typing import Any

import torch
from torch import nn

from ..operators._base.plain import as_module, parts_of_residual
from ..surgery.replace import set_submodule


@torch.no_grad()
def merge_(fused: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """The deployed form of one operator with every sum merged that can be; in place, but for the outermost.

    Under autocast to a `dtype` a linear layer stays: x, and all after it, would leave float32.
    """
    for path, part in list(fused.named_modules()):
        branch, activation = parts_of_residual(part) or (nn.Identity(), None)
        if not takes_input(branch) or (dtype is not None and type(branch) is nn.Linear):
            continue
        made = merged(branch)
        if activation is not None:
            made = nn.Sequential(made, as_module(activation)).eval()
        if not path:
            return made
        set_submodule(fused, path, made)
    return fused


def merged(layer: nn.Module) -> nn.Module:
    """A copy of the layer that returns its input as well."""
    made = copy.deepcopy(layer)
    weight = made.get_parameter("weight").data  # in its own memory order
    rows = torch.arange(len(weight), device=weight.device)
    centre: list[Any] = [size // 2 for size in weight.shape[2:]]
    # a channel's own column is counted from the first of its group
    weight[(rows, rows % weight.shape[1], *centre)] += 1
    return made


def takes_input(layer: nn.Module) -> bool:
    """Can x go into this layer's weight? It must be one linear map that keeps the size of x."""
    found: Any = layer
    if type(layer) is nn.Linear:
        return bool(found.in_features == found.out_features)
    if type(layer) is not nn.Conv2d or found.in_channels != found.out_channels or set(found.stride) != {1}:
        return False
    padding = found._reversed_padding_repeated_twice[::-2]  # in numbers, also where it says 'same'
    sizes = zip(padding, found.kernel_size, found.dilation, strict=True)
    return all(size % 2 and 2 * pad == dilation * (size - 1) for pad, size, dilation in sizes)
