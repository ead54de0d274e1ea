"""Modules that compute by other means for a while: their class changes, and comes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

Kind = TypeVar("Kind", bound=nn.Module)


@contextmanager
def exchanged(modules: Sequence[nn.Module], before: type[nn.Module], after: type[nn.Module]) -> Iterator[None]:
    """Inside, modules of the class `before` are of `after`, a subclass of it with the same attributes."""
    try:
        for module in modules:
            # the class alone changes, so parameters, hooks, state dicts and copies know nothing of it, and a
            # compiled model notices, since it guards the class of every module
            object.__setattr__(module, "__class__", after)
        yield
    finally:
        for module in modules:
            object.__setattr__(module, "__class__", before)


def plain_copies(kind: Any) -> Any:
    """For a class that stands for another: its `__reduce_ex__`, so that copies and pickles are of the other."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        state = kind.__reduce_ex__(self, protocol)[2]
        return make_bare, (kind,), state

    return __reduce_ex__


def make_bare(kind: Any) -> Any:
    return kind.__new__(kind)


def find_exactly(model: nn.Module, kind: type[Kind]) -> Iterator[Kind]:
    """The modules of a class, subclasses left to their authors, each once; nothing inside of them is looked at."""
    seen, waiting = set(), [model]
    while waiting:
        module = waiting.pop()
        if type(module) is kind:
            if id(module) not in seen:
                seen.add(id(module))
                yield module
        else:
            waiting += [child for child in module._modules.values() if child is not None]
