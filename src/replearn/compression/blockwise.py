"""Run models block by block: the order of the blocks, and their calls on every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..errors import ReplearnError
from ..fitting.observe import Reached, first, repeatable
from .activations import Arguments
from .batches import Batch, Data
from .forms import Form
from .offload import Offloader


@dataclass(frozen=True, eq=False)
class BlockCall:
    """One call of a block on one batch; its arguments may be offloaded."""

    saved: Arguments
    held_out: bool
    offloader: Offloader = field(default_factory=Offloader)
    tokens: Tensor | None = None  # False at padding

    @property
    def arguments(self) -> Arguments:
        """The arguments, on the device."""
        return self.saved.apply(self.offloader.load)

    def with_input(self, x: Tensor) -> BlockCall:
        """The same call with another input."""
        return replace(self, saved=self.saved.with_input(self.offloader.store(x)))


Calls = Sequence[BlockCall]  # of one block, for every batch


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The blocks in the order in which they run; the input of one in `follows` is the previous block's output."""

    blocks: tuple[str, ...]
    follows: frozenset[str]

    def collapse_spans(self, forms: Mapping[str, Form]) -> dict[str, Form]:
        """These forms, with removal for all but the last block of each span of adjacent ones."""
        following = dict(pairwise(self.blocks))
        inner = {name for name in forms if following.get(name) in forms.keys() & self.follows}
        return {name: "removal" if name in inner else form for name, form in forms.items()}


def find_order(model: nn.Module, blocks: Sequence[str], data: Data) -> BlockOrder:
    """Run the model once and record the order of the blocks, without those that run twice."""
    calls: list[tuple[str, Arguments, Any]] = []

    def record(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append((name, Arguments(args, kwargs), first(output)))

    run_with_hooks(model, blocks, data, record)
    names = [name for name, *_ in calls]
    once = [call for call in calls if names.count(call[0]) == 1]
    unreached = [name for name in blocks if name not in names]
    if unreached:
        raise ReplearnError(f"The loader's batches never reach {', '.join(unreached[:3])}: give batches that do.")
    if not once:
        raise ReplearnError(
            f"{names[0]} runs {names.count(names[0])} times in one call of {type(model).__name__}, and so do all "
            "its blocks; only blocks that run once can be taken out."
        )
    follows = {name for (_, a, y), (name, b, _) in pairwise(once) if y is b.x and _same_arguments(a, b)}
    return BlockOrder(tuple(name for name, *_ in once), frozenset(follows))


def run_with_hooks(model: nn.Module, names: Iterable[str], data: Data, hook: Callable[..., None]) -> None:
    """Run the model on its smallest batch; `hook` is a forward hook of these modules, with the name before."""
    with ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_hook(partial(hook, name), with_kwargs=True))
        data.run(model, smallest_batch(data))


def smallest_batch(data: Data) -> Batch:
    return min(data.batches, key=lambda batch: batch.size)


def _same_arguments(one: Arguments, two: Arguments) -> bool:
    """True if two blocks get the same arguments apart from their inputs."""
    nested = tuple, list, dict
    (ones, spec), (twos, other) = (
        tree_flatten((call.args, call.kwargs), lambda value: not isinstance(value, nested)) for call in (one, two)
    )
    if one.input_key != two.input_key or spec != other:
        return False
    simple = bool, int, float, str
    return all(
        a is one.x or a is b or (isinstance(a, simple) and type(a) is type(b) and a == b)
        for a, b in zip(ones, twos, strict=True)
    )


def record_calls(model: nn.Module, name: str, data: Data) -> Calls:
    """The call of a block on every batch; the model runs up to the block and no further."""
    block_calls: list[BlockCall] = []
    for batch in data.batches:
        with first_calls(model, [name], stop=True) as calls, suppress(Reached):
            data.run(model, batch)
        if name not in calls:
            raise ReplearnError(f"A batch of the loader never reaches {name}: give batches that do.")
        if not bool(calls[name].x.isfinite().all()):
            raise ReplearnError(
                f"The activations before {name} hold NaN or infinity: look at the batch and at the weights."
            )
        saved = calls[name].apply(data.offloader.store)
        block_calls.append(BlockCall(saved, batch.held_out, data.offloader, batch.tokens))
    return block_calls


@contextmanager
def first_calls(model: nn.Module, names: Iterable[str], *, stop: bool = False) -> Iterator[dict[str, Arguments]]:
    """Inside, record the first call of each of these blocks; `stop` ends the model's run at the first."""
    calls: dict[str, Arguments] = {}

    def record(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name not in calls:
            copied = tuple(repeatable(value) for value in args)
            call = Arguments(copied, {key: repeatable(value) for key, value in kwargs.items()})
            calls[name] = call.with_input(call.x.detach().clone())
        if stop:
            raise Reached

    with ExitStack() as hooks:
        for name in names:
            block = model.get_submodule(name)
            hooks.enter_context(block.register_forward_pre_hook(partial(record, name), with_kwargs=True))
        yield calls


class BlockwiseRun:
    """Runs two models side by side, block by block, on all batches.

    `teacher_calls` and `student_calls` are the calls of the block `name` in each model, and the same list until
    `changed` is set; `advance` moves on to the next block.
    """

    def __init__(
        self, teacher: nn.Module, student: nn.Module, order: BlockOrder, data: Data, start: int = 0
    ) -> None:
        self.teacher, self.student = teacher, student
        self.order, self.data = order, data
        self.index = start
        self.changed = False
        self.teacher_calls = record_calls(teacher, self.name, data)
        self.student_calls = self.teacher_calls

    @property
    def name(self) -> str:
        return self.order.blocks[self.index]

    def advance(self, outputs: list[Tensor] | None = None) -> bool:
        """Move on, given the teacher's outputs of this block if they are known; False after the last block."""
        if self.index + 1 == len(self.order.blocks):
            return False
        self.teacher_calls = self._next_calls(self.teacher, self.teacher_calls, outputs)
        own = self._next_calls(self.student, self.student_calls) if self.changed else self.teacher_calls
        self.student_calls = own
        self.index += 1
        return True

    @torch.no_grad()
    def _next_calls(self, model: nn.Module, calls: Calls, outputs: list[Tensor] | None = None) -> Calls:
        following = self.order.blocks[self.index + 1]
        if following in self.order.follows:
            return next_calls(model.get_submodule(self.name), calls, outputs)
        return record_calls(model, following, self.data)


def next_calls(block: nn.Module, calls: Calls, outputs: list[Tensor] | None = None) -> Calls:
    """The calls of the next block, whose inputs are this block's outputs."""
    inputs = outputs or (first(call.arguments.run(block)) for call in calls)
    return [call.with_input(x) for call, x in zip(calls, inputs, strict=True)]
