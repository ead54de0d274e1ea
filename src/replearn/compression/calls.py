"""The call of a block as it can be repeated, always by the same operations."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..errors import ReplearnError


class Arguments:
    """The arguments of a block's call, with its input among them."""

    __slots__ = ("args", "kwargs", "place")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        found = [(i, a) for i, a in enumerate(args)] + list(kwargs.items())
        for place, value in found:
            if isinstance(value, Tensor) and value.is_floating_point():
                self.place: int | str = place
                return
        raise ReplearnError("the block is given no floating-point tensor")

    @property
    def x(self) -> Tensor:
        found: Tensor = self.args[self.place] if isinstance(self.place, int) else self.kwargs[self.place]
        return found

    def given(self, x: Tensor) -> Arguments:
        """The same call with another input."""
        if isinstance(self.place, int):
            args = (*self.args[: self.place], x, *self.args[self.place + 1 :])
            return Arguments(args, self.kwargs)
        return Arguments(self.args, {**self.kwargs, self.place: x})

    def run(self, block: nn.Module) -> Any:
        # a copy of the input, because a block may write its result into it
        own = self.given(self.x.clone())
        return block(*own.args, **own.kwargs)


def argument_of(block: nn.Module, arguments: Arguments) -> str:
    """The name of a block's input, or '' where it is the block's only argument and not passed by name."""
    if isinstance(arguments.place, str):
        return arguments.place
    if len(arguments.args) + len(arguments.kwargs) == 1:
        return ""
    return next(iter(inspect.signature(block.forward).parameters), "x")


@contextmanager
def slow_attention() -> Iterator[None]:
    """Without torch's fused encoder layer, which hides a block's layers; a linear layer always runs the same way.

    Torch runs a linear layer by other operations where its input is not contiguous, as attention's is but for a
    batch of one; operations are found again by their number, so these must not differ.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _ContiguousLinear():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _ContiguousLinear(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and args:
            args = (args[0].contiguous(), *args[1:])
        elif func is functional.multi_head_attention_forward:  # its own calls are not seen here
            made = {id(value): value.contiguous() for value in args[:3]}
            args = (*(made[id(value)] for value in args[:3]), *args[3:])  # one tensor stays one
        return func(*args, **(kwargs or {}))


def first(made: Any) -> Any:
    return made[0] if isinstance(made, (tuple, list)) else made
