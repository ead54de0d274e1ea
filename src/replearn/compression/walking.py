"""Walk through the blocks of two models at once, the untouched one and the one that changes."""

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
from .batches import Batch, Data
from .calls import Arguments
from .corrections import Form
from .streaming import Stream


@dataclass(frozen=True, eq=False)
class Visit:
    """One call of a block on one batch, as it can be repeated."""

    kept: Arguments  # where they wait
    held_out: bool
    stream: Stream = field(default_factory=Stream)
    tokens: Tensor | None = None  # where the batch is no padding

    @property
    def arguments(self) -> Arguments:
        """The arguments where the block is run."""
        return self.kept.moved(self.stream.load)

    def following(self, x: Tensor) -> Visit:
        """The same call with another input, put away."""
        return replace(self, kept=self.kept.given(self.stream.keep(x)))


@dataclass(frozen=True, slots=True)
class Way:
    """The blocks in the order in which they run; those in `follows` are given what the one before made."""

    blocks: tuple[str, ...]
    follows: frozenset[str]

    def one_for_a_span(self, forms: Mapping[str, Form]) -> dict[str, Form]:
        """These forms, but that of adjacent blocks the last one's stands for all."""
        following = dict(pairwise(self.blocks))
        inner = {name for name in forms if following.get(name) in forms.keys() & self.follows}
        return {name: "removal" if name in inner else form for name, form in forms.items()}


def find_way(model: nn.Module, blocks: Sequence[str], data: Data) -> Way:
    """Run the model once and see which block follows which; those that run twice are left out."""
    ran: list[tuple[str, Arguments, Any]] = []

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
        ran.append((name, Arguments(args, kwargs), first(made)))

    run_noting(model, blocks, data, note)
    order = [name for name, *_ in ran]
    once = [one for one in ran if order.count(one[0]) == 1]
    silent = [name for name in blocks if name not in order]
    if silent:
        raise ReplearnError(f"The loader's batches never reach {', '.join(silent[:3])}: give batches that do.")
    if not once:
        raise ReplearnError(
            f"{order[0]} runs {order.count(order[0])} times in one call of {type(model).__name__}, and so do all "
            "its blocks; only blocks that run once can be taken out."
        )
    follows = {
        name for (_, before, made), (name, after, _) in pairwise(once) if made is after.x and _alike(before, after)
    }
    return Way(tuple(name for name, *_ in once), frozenset(follows))


def run_noting(model: nn.Module, names: Iterable[str], data: Data, note: Callable[..., None]) -> None:
    """Run the model on its smallest batch; `note` is told each of these modules by name as it has run."""
    with ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_hook(partial(note, name), with_kwargs=True))
        data.run(model, smallest(data))


def smallest(data: Data) -> Batch:
    return min(data.batches, key=lambda batch: batch.size)


def _alike(one: Arguments, two: Arguments) -> bool:
    """Are two blocks given the same, but for their inputs?"""
    plain = tuple, list, dict
    (ones, spec), (twos, other) = (
        tree_flatten((call.args, call.kwargs), lambda value: not isinstance(value, plain)) for call in (one, two)
    )
    if one.place != two.place or spec != other:
        return False
    simple = bool, int, float, str
    return all(
        a is one.x or a is b or (isinstance(a, simple) and type(a) is type(b) and a == b)
        for a, b in zip(ones, twos, strict=True)
    )


def visits(model: nn.Module, name: str, data: Data) -> list[Visit]:
    """Every batch's call of a block; the model is run up to it and no further."""
    found: list[Visit] = []
    for batch in data.batches:
        with first_calls(model, [name], stop=True) as calls, suppress(Reached):
            data.run(model, batch)
        if name not in calls:
            raise ReplearnError(f"A batch of the loader never reaches {name}: give batches that do.")
        if not bool(calls[name].x.isfinite().all()):
            raise ReplearnError(
                f"The activations before {name} hold NaN or infinity: look at the batch and at the weights."
            )
        found.append(Visit(calls[name].moved(data.stream.keep), batch.held_out, data.stream, batch.tokens))
    return found


@contextmanager
def first_calls(model: nn.Module, names: Iterable[str], *, stop: bool = False) -> Iterator[dict[str, Arguments]]:
    """Note the first call of each of these blocks, in the order in which they run; `stop` ends the run there."""
    calls: dict[str, Arguments] = {}

    def entered(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name not in calls:
            kept = tuple(repeatable(value) for value in args)
            call = Arguments(kept, {key: repeatable(value) for key, value in kwargs.items()})
            calls[name] = call.given(call.x.detach().clone())
        if stop:
            raise Reached

    with ExitStack() as hooks:
        for name in names:
            block = model.get_submodule(name)
            hooks.enter_context(block.register_forward_pre_hook(partial(entered, name), with_kwargs=True))
        yield calls


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
        if self.at + 1 == len(self.way.blocks):
            return False
        self.teacher = self._following(self.models[0], self.teacher, outputs)
        self.student = self._following(self.models[1], self.student) if self.changed else self.teacher
        self.at += 1
        return True

    @torch.no_grad()
    def _following(self, model: nn.Module, now: list[Visit], outputs: list[Tensor] | None = None) -> list[Visit]:
        following = self.way.blocks[self.at + 1]
        if following in self.way.follows:
            return passed_on(model.get_submodule(self.name), now, outputs)
        return visits(model, following, self.data)


def passed_on(block: nn.Module, visits: Sequence[Visit], outputs: list[Tensor] | None = None) -> list[Visit]:
    """The calls of the block that follows, which is given what this one makes."""
    made = outputs or (first(visit.arguments.run(block)) for visit in visits)
    return [visit.following(y) for visit, y in zip(visits, made, strict=True)]
