"""Walk through the blocks of two models at once, the untouched one and the one that changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ReplearnError
from ..fitting.observe import first, repeatable
from .batches import Data, Stopped
from .calls import Arguments
from .streaming import Stream


@dataclass(frozen=True, eq=False)
class Visit:
    """One call of a block on one batch, as it can be repeated."""

    kept: Arguments  # where they wait
    held_out: bool
    stream: Stream = field(default_factory=Stream)

    @property
    def arguments(self) -> Arguments:
        """The arguments where the block is run."""
        return Arguments(self.stream.load(self.kept.args), self.stream.load(self.kept.kwargs))

    def following(self, x: Tensor) -> Visit:
        """The same call with another input, put away."""
        return Visit(self.kept.given(self.stream.keep(x)), self.held_out, self.stream)


@dataclass(frozen=True, slots=True)
class Way:
    """The blocks in the order in which they run; those in `follows` are given what the one before made."""

    blocks: tuple[str, ...]
    follows: frozenset[str]
    returns_tuple: frozenset[str]


def find_way(model: nn.Module, blocks: Sequence[str], data: Data) -> Way:
    """Run the model once and see which block follows which; a block that runs twice is an error."""
    ran: list[tuple[str, Any, Any, Any]] = []
    handles = []
    for name in blocks:

        def note(module: nn.Module, args: Any, kwargs: Any, made: Any, name: str = name) -> None:
            ran.append((name, args, kwargs, made))

        handles.append(model.get_submodule(name).register_forward_hook(note, with_kwargs=True))
    try:
        data.run(model, smallest(data))
    finally:
        for handle in handles:
            handle.remove()
    order = [name for name, *_ in ran]
    silent = [name for name in blocks if name not in order]
    if silent:
        raise ReplearnError(f"The loader's batches never reach {', '.join(silent[:3])}: give batches that do.")
    twice = [name for name in order if order.count(name) > 1]
    if twice:
        raise ReplearnError(
            f"{twice[0]} runs {order.count(twice[0])} times in one call of {type(model).__name__}; only blocks "
            "that run once can be taken out."
        )
    follows = {
        after[0]
        for before, after in pairwise(ran)
        if first(before[3]) is Arguments(after[1], after[2]).x and _alike(before, after)
    }
    tuples = frozenset(name for name, _, _, made in ran if isinstance(made, (tuple, list)))
    return Way(tuple(order), frozenset(follows), tuples)


def smallest(data: Data) -> Any:
    return min(data.batches, key=lambda batch: batch.size)


def _alike(before: tuple[str, Any, Any, Any], after: tuple[str, Any, Any, Any]) -> bool:
    """Are two blocks given the same, but for their inputs?"""
    one, two = Arguments(before[1], before[2]), Arguments(after[1], after[2])
    if one.place != two.place or len(one.args) != len(two.args) or one.kwargs.keys() != two.kwargs.keys():
        return False
    pairs = [*zip(one.args, two.args, strict=True), *((one.kwargs[k], two.kwargs[k]) for k in one.kwargs)]
    return all(_same(a, b) for a, b in pairs if a is not one.x)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, (tuple, list)) and type(a) is type(b) and len(a) == len(b):
        return all(_same(x, y) for x, y in zip(a, b, strict=True))
    return isinstance(a, (bool, int, float, str)) and type(a) is type(b) and a == b


def visits(model: nn.Module, name: str, data: Data) -> list[Visit]:
    """Every batch's call of a block; the model is run up to it and no further."""
    found: list[Visit] = []
    for batch in data.batches:
        with caught(model.get_submodule(name)) as calls, suppress(Stopped):
            data.run(model, batch)
        if not calls:
            raise ReplearnError(f"A batch of the loader never reaches {name}: give batches that do.")
        if not bool(calls[0].x.isfinite().all()):
            raise ReplearnError(
                f"The activations before {name} hold NaN or infinity: look at the batch and at the weights."
            )
        kept = Arguments(data.stream.keep(calls[0].args), data.stream.keep(calls[0].kwargs))
        found.append(Visit(kept, batch.held_out, data.stream))
    return found


@contextmanager
def caught(block: nn.Module, *, stop: bool = True) -> Iterator[list[Arguments]]:
    """Note the calls of a block, and end the model's run at the first."""
    calls: list[Arguments] = []

    def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
        kept = tuple(repeatable(value) for value in args)
        arguments = Arguments(kept, {name: repeatable(value) for name, value in kwargs.items()})
        calls.append(arguments.given(arguments.x.detach().clone()))
        if stop:
            raise Stopped

    handle = block.register_forward_pre_hook(entered, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


class Walk:
    """The calls of the present block in both models, for every batch.

    `teacher` and `student` are the visits of the block at `name`; `advance` goes on to the next one. Until
    something changed, both are the same.
    """

    def __init__(self, teacher: nn.Module, student: nn.Module, way: Way, data: Data, start: int = 0) -> None:
        self.models = (teacher, student)
        self.way, self.data = way, data
        self.at = start
        self.changed = False
        self.teacher = visits(teacher, self.name, data)
        self.student = self.teacher

    @property
    def name(self) -> str:
        return self.way.blocks[self.at]

    def advance(self, outputs: list[Tensor] | None = None) -> bool:
        """Go on to the next block, given the teacher's outputs of this one if they are known; False at the end."""
        block = [model.get_submodule(self.name) for model in self.models]
        if self.at + 1 == len(self.way.blocks):
            return False
        following = self.way.blocks[self.at + 1]
        chained = following in self.way.follows
        with torch.no_grad():
            if chained:
                after = passed_on(block[0], self.teacher, outputs)
                if self.changed:
                    self.student = passed_on(block[1], self.student)
            else:
                after = visits(self.models[0], following, self.data)
                if self.changed:
                    self.student = visits(self.models[1], following, self.data)
        self.teacher = after
        if not self.changed:
            self.student = after
        self.at += 1
        return True


def passed_on(block: nn.Module, visits: Sequence[Visit], outputs: list[Tensor] | None = None) -> list[Visit]:
    """The calls of the block that follows, which is given what this one makes."""
    made = outputs or (first(visit.arguments.run(block)) for visit in visits)
    return [visit.following(y) for visit, y in zip(visits, made, strict=True)]
