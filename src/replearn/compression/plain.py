"""Turn corrections into ordinary modules: a full convolution takes the sum x + W x up into its weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..surgery.replace import set_submodule
from .corrections import Correction, adopt_attributes_


@torch.no_grad()
def plain_(model: nn.Module) -> nn.Module:
    """Exchange every correction that can be for standard layers with the same outputs; returns the model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Correction) and not module.argument and not module.length:
            made = merged(module)
            if made is not None:
                set_submodule(model, name, adopt_attributes_(made.train(module.training), module))
    return model


def merged(correction: Correction) -> nn.Module | None:
    """Standard layers that compute the same, or None."""
    inner: Any = correction.map
    if inner is None:
        return correction.after or nn.Identity()
    if isinstance(inner, nn.Linear):
        layer: nn.Module = nn.Linear(inner.in_features, inner.out_features).to(inner.weight)
        weight = inner.weight + torch.eye(inner.in_features).to(inner.weight)
        layer.get_parameter("weight").copy_(weight)
        layer.get_parameter("bias").copy_(inner.bias)
    elif isinstance(inner, nn.Sequential) and len(inner) == 2 and isinstance(inner[0], nn.Conv2d):
        conv: Any = inner[0]
        norm: Any = inner[1]
        gain = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        weight = conv.weight.double() * gain[:, None, None, None]
        middle = conv.kernel_size[0] // 2
        weight[:, :, middle, middle] += torch.eye(len(weight)).to(weight)
        layer = nn.Conv2d(len(weight), len(weight), conv.kernel_size, padding=middle).to(conv.weight)
        layer.get_parameter("weight").copy_(weight)
        layer.get_parameter("bias").copy_(norm.bias.double() - norm.running_mean.double() * gain)
    else:
        return None
    return layer if correction.after is None else nn.Sequential(layer, correction.after)
