"""Tensors that are made within torch.inference_mode can't be trained, written to or given gradients after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def lasting() -> Iterator[None]:
    """Make ordinary tensors, without gradients, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.no_grad():
        yield
