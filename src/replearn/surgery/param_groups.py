"""Parameter groups for your optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import ReplearnError
from ..operators._base.operator import Operator


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: everything with weight decay, and the coefficients without.

    >>> import replearn, torch
    >>> model = replearn.models.resnet32()
    >>> _ = replearn.replace_(model, replearn.plan(model))
    >>> optimizer = torch.optim.SGD(replearn.param_groups(model, 1e-4), lr=0.1)
    >>> [group["weight_decay"] for group in optimizer.param_groups]
    [0.0001, 0.0]
    """
    if not isinstance(model, nn.Module):
        raise ReplearnError(f"Expected a torch.nn.Module, got {type(model).__name__}.")
    number = isinstance(weight_decay, (int, float)) and not isinstance(weight_decay, bool)
    if not number or not 0 <= weight_decay < float("inf"):
        raise ReplearnError(f"weight_decay={weight_decay!r}: write a number from 0 up, as 1e-4.")
    free = {id(p) for m in model.modules() if isinstance(m, Operator) for p in m.coefficients()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if id(p) not in free], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in free], "weight_decay": 0.0},
    ]
