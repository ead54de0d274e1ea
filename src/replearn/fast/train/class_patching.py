"""Class patching: modules of a class belong to a subclass for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def patched_class(modules: Sequence[nn.Module], before: type[nn.Module], after: type[nn.Module]) -> Iterator[None]:
    """Inside, modules of the class `before` are of `after`, a subclass of it with the same attributes."""
    try:
        for module in modules:
            # Parameters, hooks, state dicts and copies stay as they are, and compiled code guards the class.
            object.__setattr__(module, "__class__", after)
        yield
    finally:
        for module in modules:
            object.__setattr__(module, "__class__", before)


def reduce_as(original: Any) -> Any:
    """The `__reduce_ex__` of a subclass whose copies and pickles are of the original class."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        state = original.__reduce_ex__(self, protocol)[2]
        return _new_instance, (original,), state

    return __reduce_ex__


def _new_instance(original: Any) -> Any:
    return original.__new__(original)
