"""The arguments of a block's call, and the values inside the block while it runs on them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..blocks.global_settings import plain_encoder_layers
from ..errors import ReplearnError
from ..fitting.observe import first

OpKey = tuple[str, int]  # an operation's name and the index of its call: the same in every run of the block


class Arguments:
    """The arguments of a block's call; the first floating-point tensor among them is its input."""

    __slots__ = ("args", "input_key", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        items: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        for key, value in items:
            if isinstance(value, Tensor) and value.is_floating_point():
                self.input_key = key
                return
        raise ReplearnError("the block is given no floating-point tensor")

    @property
    def x(self) -> Tensor:
        key = self.input_key
        x: Tensor = self.args[key] if isinstance(key, int) else self.kwargs[key]
        return x

    def with_input(self, x: Tensor) -> Arguments:
        """The same arguments with another input."""
        key = self.input_key
        if isinstance(key, int):
            return Arguments((*self.args[:key], x, *self.args[key + 1 :]), self.kwargs)
        return Arguments(self.args, {**self.kwargs, key: x})

    def apply(self, function: Callable[[Any], Any]) -> Arguments:
        """The arguments after a function of nested tensors, which moves them to a device for example."""
        return Arguments(function(self.args), function(self.kwargs))

    def run(self, block: nn.Module) -> Any:
        """Run the block on a copy of the input, since a block may write its result into it."""
        own = self.with_input(self.x.clone())
        return block(*own.args, **own.kwargs)


def input_name(block: nn.Module, arguments: Arguments) -> str:
    """The name of a block's input; '' if it is the only argument and positional."""
    if isinstance(arguments.input_key, str):
        return arguments.input_key
    if len(arguments.args) + len(arguments.kwargs) == 1:
        return ""
    return next(iter(inspect.signature(block.forward).parameters), "x")


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Disable torch's fused encoder layer, and run each linear layer by the same operations for every batch.

    Torch chooses them by whether the input is contiguous, which attention's is for a batch of one alone; recorded
    values are identified by the index of their operation.
    """
    with plain_encoder_layers(), _ContiguousLinear():
        yield


class _ContiguousLinear(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and args:
            args = (args[0].contiguous(), *args[1:])
        elif func is functional.multi_head_attention_forward:  # its inner calls do not reach this mode
            contiguous = {id(value): value.contiguous() for value in args[:3]}
            args = (*(contiguous[id(value)] for value in args[:3]), *args[3:])  # self-attention keeps one tensor
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class ValueKey:
    """A value inside a block: positional argument `arg` of an operation, or the operation's result for -1."""

    op: OpKey
    arg: int = -1


def run_and_record(
    block: nn.Module, arguments: Arguments, keys: Iterable[ValueKey], *, stop_early: bool = False
) -> tuple[Tensor | None, dict[ValueKey, Tensor]]:
    """Run a block and return its output and the values of these keys.

    With `stop_early` the run ends when all values are recorded, and the output is None. Raises ReplearnError if
    an operation did not run because the block's code took another path than when it was traced.
    """
    wanted = tuple(dict.fromkeys(keys))
    recorder = _ValueRecorder(wanted, stop=stop_early)
    output = None
    with unfused_attention(), torch.no_grad():
        try:
            with recorder if wanted else nullcontext():
                output = first(arguments.run(block))
        except _AllRecorded:
            pass
    if len(recorder.values) < len(wanted):
        missing = next(key for key in wanted if key not in recorder.values)
        raise ReplearnError(
            f"{type(block).__name__} took another path through its code on this batch than on the first: its "
            f"{missing.op[0]} number {missing.op[1]} did not run. Give batches of one kind and length."
        )
    return output, recorder.values


class _AllRecorded(Exception):
    pass


class _ValueRecorder(TorchDispatchMode):
    def __init__(self, keys: Iterable[ValueKey], *, stop: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.values: dict[ValueKey, Tensor] = {}
        self._wanted: dict[OpKey, list[ValueKey]] = {}
        for key in keys:
            self._wanted.setdefault(key.op, []).append(key)
        self._num_missing = sum(map(len, self._wanted.values()))
        self._stop = stop
        self._counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        keys = self._wanted.get((name, self._counts[name]), ())
        self._counts[name] += 1
        for key in keys:
            if key.arg >= 0:
                self._record(key, args[key.arg])
        output = func(*args, **(kwargs or {}))
        for key in keys:
            if key.arg < 0:
                self._record(key, next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)))
        return output

    def _record(self, key: ValueKey, value: Tensor) -> None:
        self.values[key] = value.detach().clone()  # later operations may write into the tensor
        self._num_missing -= 1
        if self._stop and not self._num_missing:
            raise _AllRecorded
