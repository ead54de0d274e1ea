"""The call of a block as it can be repeated, always by the same operations, and values inside it."""

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

Key = tuple[str, int]  # an operation and which of its calls in the block: the same in every run of the block


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

    def moved(self, move: Callable[[Any], Any]) -> Arguments:
        """The same call with its tensors elsewhere."""
        return Arguments(move(self.args), move(self.kwargs))

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
    with plain_encoder_layers(), _ContiguousLinear():
        yield


class _ContiguousLinear(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and args:
            args = (args[0].contiguous(), *args[1:])
        elif func is functional.multi_head_attention_forward:  # its own calls are not seen here
            made = {id(value): value.contiguous() for value in args[:3]}
            args = (*(made[id(value)] for value in args[:3]), *args[3:])  # one tensor stays one
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class Tap:
    """A value to look at: the positional argument `place` of an operation, or its result where that is -1."""

    key: Key
    place: int = -1


def tapped(
    block: nn.Module, arguments: Arguments, taps: Iterable[Tap], *, to_the_end: bool = True
) -> tuple[Tensor | None, dict[Tap, Tensor]]:
    """Run a block and return its output and the values at the taps.

    With `to_the_end=False` the run ends when all taps are seen, and the output is None. Raises ReplearnError
    where an operation did not run: the block's code took another way than when it was traced.
    """
    wanted = tuple(dict.fromkeys(taps))
    looking = _Looking(wanted, stop=not to_the_end)
    made = None
    with slow_attention(), torch.no_grad():
        try:
            with looking if wanted else nullcontext():
                made = first(arguments.run(block))
        except _Seen:
            pass
    if len(looking.found) < len(wanted):
        missing = next(tap for tap in wanted if tap not in looking.found)
        raise ReplearnError(
            f"{type(block).__name__} took another way through its code on this batch than on the first: its "
            f"{missing.key[0]} number {missing.key[1]} did not run. Give batches of one kind and length."
        )
    return made, looking.found


class _Seen(Exception):
    pass


class _Looking(TorchDispatchMode):
    def __init__(self, taps: Iterable[Tap], *, stop: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Tap, Tensor] = {}
        self._wanted: dict[Key, list[Tap]] = {}
        for tap in taps:
            self._wanted.setdefault(tap.key, []).append(tap)
        self._left = sum(map(len, self._wanted.values()))
        self._stop = stop
        self._counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        taps = self._wanted.get((name, self._counts[name]), ())
        self._counts[name] += 1
        # copies, because code after this may write into these tensors
        for tap in taps:
            if tap.place >= 0:
                self._note(tap, args[tap.place])
        made = func(*args, **(kwargs or {}))
        for tap in taps:
            if tap.place < 0:
                self._note(tap, next(leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)))
        return made

    def _note(self, tap: Tap, value: Tensor) -> None:
        self.found[tap] = value.detach().clone()
        self._left -= 1
        if self._stop and not self._left:
            raise _Seen
