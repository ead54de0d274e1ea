"""Layers whose weights autocast casts one by one, and the way to give them weights that were cast together.

Under autocast every convolution and linear layer casts its weight, and its gradient back: four calls of Python and
two launches a layer and step, a tenth of an eager step that waits for Python. Here the casts are found; they are
made in the launch that makes the operators' weights (`synthesizing.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .operators.fused import kernels_run_on, rows_are_dense

# only these themselves: another class may do something else with its weight
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Place(NamedTuple):
    """A parameter, and the register of its layer that it stands in."""

    register: dict[str, Any]
    name: str
    parameter: nn.Parameter


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
        and parameter.dtype is torch.float32
        and kernels_run_on(parameter)
        and rows_are_dense(parameter)
    )


class InPlace(AbstractContextManager[None]):
    """While it is entered, layers compute with these tensors in place of their parameters."""

    def __init__(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
        self._places, self._tensors = places, tensors

    def __enter__(self) -> None:
        for (register, name, _), tensor in zip(self._places, self._tensors, strict=True):
            register[name] = tensor

    def __exit__(self, *error: object) -> None:
        for register, name, parameter in self._places:
            register[name] = parameter
