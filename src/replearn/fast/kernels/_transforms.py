"""Whether torch takes a computation apart in ways that our kernels know nothing of."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def transformed() -> bool:
    """Whether torch.func is at work, or derivatives go forward; those that go backward, requires_grad tells of."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
