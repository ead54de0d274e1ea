"""Tensors in tuples, lists and dicts: what two such nests have in common, and the same nest with other tensors."""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ...errors import ReplearnError

PLAIN = (bool, int, str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum)


def signature(value: Any, tensors: list[Tensor], verb: str) -> Hashable:
    """What two calls have in common that may replay the same graph; the tensors go to a list, in order."""
    kind = type(value)
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise ReplearnError(f"A replayed model {verb} no tensors with the layout {value.layout}.")
        tensors.append(value)
        return kind, value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return kind, *[signature(item, tensors, verb) for item in value]
    if isinstance(value, dict):
        return kind, *[(key, signature(item, tensors, verb)) for key, item in value.items()]
    if isinstance(value, float):
        return kind, value.hex()  # equal numbers alone: -0.0 is not 0.0, and NaN is itself
    if value is None or isinstance(value, PLAIN):
        return kind, value
    raise ReplearnError(
        f"A replayed model {verb} tensors, in tuples, lists and dicts, and plain values, not {kind.__name__}: a "
        "graph can't tell what is in it. Hand over its tensors, or leave it out (a Hugging Face model: "
        "use_cache=False)."
    )


def rebuilt(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with other tensors in it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [rebuilt(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = rebuilt(item, change)
        return made
    return value
