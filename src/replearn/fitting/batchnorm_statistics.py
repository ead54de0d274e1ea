"""Running statistics of BatchNorms, measured anew on given calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


@torch.no_grad()
def estimate_statistics_(module: nn.Module, calls: Iterable[Callable[[nn.Module], Any]]) -> bool:
    """Set every BatchNorm's running statistics to the averages over these calls; False where there is none."""
    norms = [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None
    ]
    if not norms:
        return False
    before = [(norm, norm.momentum, norm.training) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average of all batches
        norm.training = True
    try:
        for call in calls:
            call(module)
    finally:
        for norm, momentum, training in before:
            norm.momentum, norm.training = momentum, training
    return True
