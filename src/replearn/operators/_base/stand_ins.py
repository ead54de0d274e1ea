"""Tensors that stand in for parameters during a forward pass, and the parameters that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Place(NamedTuple):
    """A parameter, and the register of its layer that it stands in."""

    register: dict[str, Any]
    name: str
    parameter: nn.Parameter


class InPlace(AbstractContextManager[None]):
    """While it is entered, layers compute with these tensors in place of their parameters."""

    def __init__(self, places: Sequence[Place], tensors: Sequence[Tensor]) -> None:
        self.places, self.tensors = places, tensors

    def __enter__(self) -> None:
        self._token = _entered.set(self)
        for (register, name, _), tensor in zip(self.places, self.tensors, strict=True):
            register[name] = tensor

    def __exit__(self, *error: object) -> None:
        _entered.reset(self._token)
        for (register, name, parameter), tensor in zip(self.places, self.tensors, strict=True):
            if register.get(name) is tensor:  # or somebody gave the layer another, which is then its own
                register[name] = parameter


_entered: ContextVar[InPlace | None] = ContextVar("stand_ins", default=None)


def some_stand_in() -> bool:
    return _entered.get() is not None


def parameter_behind(tensor: Tensor | None) -> Tensor | None:
    """What an operator reads: the parameter itself, also where something stands in for it."""
    if torch.compiler.is_compiling():  # which takes what is there, and could not trace the question
        return tensor
    entered = _entered.get()
    if entered is None or tensor is None:
        return tensor
    pairs = zip(entered.places, entered.tensors, strict=True)
    return next((place.parameter for place, stand_in in pairs if stand_in is tensor), tensor)
