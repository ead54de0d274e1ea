"""Running statistics of a BatchNorm, for kernels that update them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Running(NamedTuple):
    """Running mean and variance, number of batches, and update factors."""

    tensors: tuple[Tensor, Tensor, Tensor]
    momentum: float
    unbiased: float  # n / (n - 1)

    @classmethod
    def of(cls, norm: nn.BatchNorm2d, x: Tensor) -> Running | None:
        """None if the norm has none, or its layer is being recomputed, which unsets the number of batches."""
        mean, variance, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
        if mean is None or variance is None or batches is None:
            return None
        torch.autograd.graph.increment_version((mean, variance, batches))  # autograd does not see the kernel
        pixels = x.numel() // x.shape[1]
        return cls((mean, variance, batches), float(norm.momentum or 0.0), pixels / max(1, pixels - 1))
