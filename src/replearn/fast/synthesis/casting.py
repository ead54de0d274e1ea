"""Layers whose weights autocast casts one by one: which of them our kernel can cast together.

Under autocast every convolution and linear layer casts its weight, and its gradient back: four calls of Python and
two launches a layer and step, where eager steps wait for Python. `synthesizing.py` has the casts made in the
launch that makes the operators' weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ...operators._base.stand_ins import Place
from .batch import kernels_run_on
from .layout import rows_are_dense

# only these themselves: another class may do something else with its weight
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def cast_places(model: nn.Module) -> Iterator[Place]:
    """Every weight and bias of the model that autocast casts, and that our kernel can."""
    for module in model.modules():
        if type(module) in LAYERS:
            for name in ("weight", "bias"):  # others are of somebody who computes the weight, as weight_norm
                parameter = module._parameters.get(name)
                if parameter is not None and can_be_cast(parameter):
                    yield Place(module._parameters, name, parameter)


def can_be_cast(parameter: nn.Parameter) -> bool:
    return (
        type(parameter) is nn.Parameter
        and parameter.requires_grad  # one that is frozen has no gradient to cast back, and is left to autocast
        and parameter.dtype is torch.float32
        and kernels_run_on(parameter)
        and rows_are_dense(parameter)
    )


def tree_of(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Every module's place in the one around it: as long as these stay, no layer has gone."""
    for module in model.modules():
        yield from ((module._modules, name, child) for name, child in module._modules.items())
