"""The running statistics of a BatchNorm, for kernels that move them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Running(NamedTuple):
    """A norm's running statistics that a kernel moves, with the count of batches, and how far they move."""

    tensors: tuple[Tensor, Tensor, Tensor]
    momentum: float
    unbiased: float  # a variance is that of the batch times this

    @classmethod
    def of(cls, norm: nn.BatchNorm2d, x: Tensor) -> Running | None:
        """None where there are none to move: the norm has none, or its layer is recomputed, without a count."""
        mean, variance, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
        if mean is None or variance is None or batches is None:
            return None
        torch.autograd.graph.increment_version((mean, variance, batches))  # autograd does not see the kernel
        pixels = x.numel() // x.shape[1]
        return cls((mean, variance, batches), float(norm.momentum or 0.0), pixels / max(1, pixels - 1))
