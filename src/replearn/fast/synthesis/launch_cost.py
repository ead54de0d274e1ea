"""When kernels pay that move fewer bytes and take more launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from ...operators.functional import register
from ..graphs.capture import is_capturing_here

LEAST = 2**25  # elements of the wide tensor: moving it 7 times less saves 0.1 ms
_free: ContextVar[bool] = ContextVar("free_launches", default=False)


def pays(size: int) -> bool:
    """True if a wide tensor of this size saves more GPU time than the launches cost; always in a captured step."""
    return torch.compiler.is_compiling() or _free.get() or size >= LEAST or is_capturing_here()


@contextmanager
def free_launches() -> Iterator[None]:
    """Compute as in a captured step, where launches are free; for cost predictions."""
    token = _free.set(True)
    try:
        yield
    finally:
        _free.reset(token)


@register("recompute_context")
def recompute_context() -> Callable[[], AbstractContextManager[None]]:
    """Recomputation runs in another thread, and must choose the same kernels as the first run."""
    return free_launches if is_capturing_here() else nullcontext
