"""Two models that learned from one batch: whether they learned the same."""

from __future__ import annotations

import torch
from torch import nn


def learned_alike(model: nn.Module, twin: nn.Module, *, rtol: float, atol: float) -> None:
    """Gradients and buffers are equal up to this; every parameter has a gradient."""
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert other.grad is not None, name
        torch.testing.assert_close(other.grad, one.grad, rtol=rtol, atol=atol, msg=name)
    torch.testing.assert_close(dict(twin.named_buffers()), dict(model.named_buffers()), rtol=1e-4, atol=1e-4)
