"""Whether an operator pays that moves its wide tensors less often, and launches more kernels for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

from ...operators.functional import register
from ..graphs.capture import is_capturing_here

LEAST = 2**25  # numbers in the wide tensor: moving it 7 times less saves 0.1 ms on a fast GPU
_free: ContextVar[bool] = ContextVar("free_launches", default=False)


def pays(size: int) -> bool:
    """Whether what the GPU saves for a wide tensor of this many numbers is more than what Python takes for it."""
    # where a step is recorded, launches cost nothing
    return torch.compiler.is_compiling() or _free.get() or size >= LEAST or is_capturing_here()


@contextmanager
def free_launches() -> Iterator[None]:
    """Compute as in a captured step, where launches cost nothing: for predicting what such a step takes."""
    token = _free.set(True)
    try:
        yield
    finally:
        _free.reset(token)


@register("recompute_context")
def recompute_context() -> Callable[[], AbstractContextManager[None]]:
    """The second run is in another thread, which does not record: it must choose as the first did."""
    return free_launches if is_capturing_here() else nullcontext
