"""The door `choose`: what is asked for, and which blocks go, each by the least damage for what it saves."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from ..costs.budgets import as_budgets
from ..errors import ReplearnError
from ..planning.data import Plan
from ..planning.table import shown, text_table
from ..planning.validate import own_copy
from ..surgery.replace import set_submodule
from .batches import Data, device_of, subset
from .corrections import Form, put_
from .fit import place_of
from .measure import Metric, Price, agreement, answers, class_dim, outputs
from .prices import Prices
from .recognise import Recognition
from .stand_ins import fit_block, map_inputs
from .walking import Visit, Walk, visits

Quantity = Literal["latency", "parameters", "flops", "blocks"]
EXAMPLES = "'latency<=75%', 'parameters<=60%', 'flops<=70%', 'blocks=12', names of blocks or a Plan"


@dataclass(frozen=True, slots=True)
class Goal:
    """At most this share of a quantity, or so many blocks out; or the blocks themselves."""

    quantity: str = "blocks"
    at_most: float = 0.0  # the share, or the number of blocks
    names: tuple[str, ...] = ()
    removal: frozenset[str] = frozenset()  # of the names: those that a plan wants nothing for


def read_budget(given: Any) -> Goal:
    """A budget from what the user wrote; ReplearnError says how to write one."""
    if isinstance(given, Plan):
        bare = frozenset(target.name for target in given.targets if target.operator.name == "removal")
        return Goal(names=tuple(target.name for target in given.targets), removal=bare)
    if isinstance(given, str) and re.fullmatch(r"[\w, ]+\.[\w., ]+", given):  # names have dots
        given = [name.strip() for name in given.split(",")]
    if isinstance(given, str):
        with suppress(ReplearnError):  # which speaks of budgets that are none here
            first, *more = as_budgets(given)
            if not more and (first.quantity == "blocks" or (first.share and first.quantity in get_args(Quantity))):
                return Goal(first.quantity, first.at_most)
    elif isinstance(given, Sequence) and given and all(isinstance(name, str) for name in given):
        if len(set(given)) < len(given):
            raise ReplearnError(f"budget={list(given)!r} names a block twice; a block goes once.")
        return Goal(names=tuple(given))
    raise ReplearnError(f"budget={given!r} can't be read: write {EXAMPLES}.")


SAMPLES = 48  # for fitting while choosing, and as many for scoring
FEW = 1000  # decisions on so many samples, by fewer of which divergences rank blocks by chance
JUDGED = 128  # samples for scoring where decisions are few
WIDEST = 1536  # inputs of a full map that is still fitted while choosing


@dataclass(frozen=True, slots=True)
class Step:
    """One block that goes: the damage after it on held-out samples, and what the blocks so far save by removal."""

    name: str
    damage: float
    saved: Price


@dataclass(frozen=True, slots=True)
class Choice:
    """The blocks in the order in which they go; `print` shows a table."""

    steps: tuple[Step, ...]
    quantity: str

    def __str__(self) -> str:
        rows = [
            (shown(s.name), f"{s.damage:.4f}", f"{s.saved.latency * 1e3:.2f}", f"{s.saved.parameters:,.0f}")
            for s in self.steps
        ]
        head = ("goes", "damage", "ms saved", "parameters saved")
        return "\n".join(text_table(head, rows, right=(1, 2, 3)))


class Chooser:
    """Takes blocks out of a copy of the model one by one: always the one with the least damage for what it saves.

    While choosing, a map fitted to a few samples stands for a block. Damage is measured on held-out samples: what
    the metric loses, the divergence from the untouched model, or with few decisions the squared error of the
    logits, which a few samples tell better. Scores are renewed only where they could matter: a block is taken when
    its fresh score is still the least.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        found: Recognition,
        data: Data,
        prices: Prices,
        quantity: str,
        metric: Metric | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.model, self.found, self.quantity = model, found, quantity
        self.metric, self.progress = metric, progress
        self.few = subset(data, SAMPLES)
        self.taught = outputs(model, self.few, self.few.held())
        self.few_decisions = sum(made.numel() // made.shape[class_dim(made)] for made in self.taught) < FEW
        if self.few_decisions:
            self.few = subset(data, SAMPLES, JUDGED)
            self.taught = outputs(model, self.few, self.few.held())
        self.working = own_copy(model, share=True)
        self.aims = all_visits(model, found, self.few)
        self.form = trial_form(model, found, self.aims)
        self.saves = {name: prices.block(name) for name in found.candidates}
        self.top = metric(model) if metric is not None else 0.0
        self.left = list(found.candidates)
        self.steps: list[Step] = []
        self._scores: dict[str, tuple[float, float, nn.Module]] = {}

    @property
    def choice(self) -> Choice:
        return Choice(tuple(self.steps), self.quantity)

    def names(self, number: int) -> list[str]:
        """The first so many blocks that go, or all that can."""
        while len(self.steps) < number and self.further():
            pass
        return [step.name for step in self.steps[:number]]

    @torch.no_grad()
    def further(self) -> bool:
        """Take one more block out; False where none is left."""
        if not self.left:
            return False
        before = self.steps[-1] if self.steps else Step("", 0.0, Price(0, 0, 0))
        fresh: set[str] = set()
        while True:
            unscored = [name for name in self.left if name not in self._scores]
            name = unscored[0] if unscored else min(self.left, key=lambda item: self._scores[item][0])
            if name in fresh:
                break
            after, made = self._tried(name)
            gain = 1.0 if self.quantity == "blocks" else max(self.saves[name].of(self.quantity), 1e-30)
            self._scores[name] = (max(after - before.damage, 0.0) / gain, after, made)
            fresh.add(name)
            if self.progress is not None:
                self.progress(f"scored {name}")
        _, damage, made = self._scores.pop(name)
        set_submodule(self.working, name, made)
        self.left.remove(name)
        self.steps.append(Step(name, damage, before.saved + self.saves[name]))
        return True

    def _tried(self, name: str) -> tuple[float, nn.Module]:
        now: list[Visit] = visits(self.working, name, self.few)
        teacher = self.model.get_submodule(name)
        with self.few.stream.weights(self.working.get_submodule(name)), self.few.stream.weights(teacher):
            place = place_of(self.working, name, now)
            made, _, _ = fit_block(place, self.form, teacher, self.aims[name], now, 8)
        made.to(device_of(self.model))
        put_(self.working, name, made)
        try:
            return self._damage(), made
        finally:
            set_submodule(self.working, name, place.block)

    def _damage(self) -> float:
        found = agreement(self.taught, answers(self.working, self.few, self.few.held()))
        gap = found.error if self.few_decisions else found.divergence
        return gap if self.metric is None else (self.top - self.metric(self.working)) + 1e-3 * gap


def trial_form(model: nn.Module, found: Recognition, aims: Mapping[str, list[Visit]]) -> Form:
    """What stands for blocks while choosing: a full map, or scales and shifts where a full one is too large."""
    sizes = [map_inputs(model.get_submodule(b.name), b.structure, aims[b.name][0].arguments.x)
             for b in found.blocks if not b.kept]  # fmt: skip
    return "full" if max(sizes, default=0) <= WIDEST else "channels"


def choose(
    model: nn.Module,
    found: Recognition,
    data: Data,
    number: int,
    *,
    quantity: Quantity = "latency",
    metric: Metric | None = None,
    progress: Callable[[str], None] | None = None,
) -> Choice:
    """The blocks that go first, so many or all that can, each by the least damage for what it saves."""
    chooser = Chooser(model, found, data, Prices(model, found, data, 8), quantity, metric, progress)
    chooser.names(number)
    return chooser.choice


def all_visits(model: nn.Module, found: Recognition, data: Data) -> dict[str, list[Visit]]:
    """The calls of every candidate in the untouched model."""
    walk = Walk(model, model, found.way, data)
    calls = {walk.name: walk.teacher}
    while walk.advance():
        calls[walk.name] = walk.teacher
    return {name: calls[name] for name in found.candidates}


def check_names(names: Sequence[str], found: Recognition) -> None:
    """Refuse names that are no blocks, and blocks that can't go."""
    known = {block.name: block for block in found.blocks}
    for name in names:
        if name not in known:
            some = ", ".join(found.candidates[:8]) + (", ..." if len(found.candidates) > 8 else "")
            raise ReplearnError(
                f"{name!r} is no block of {found.model}. Its blocks are {found.blocks[0].name} to "
                f"{found.blocks[-1].name}; those that can go: {some}."
            )
        if known[name].kept:
            raise ReplearnError(f"{name} can't go: {known[name].kept}. Leave it out.")
