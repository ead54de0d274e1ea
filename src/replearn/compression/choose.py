"""Read the budget, and choose the blocks to remove by the least damage per saving."""

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
from .block_costs import BlockCosts
from .blockwise import BlockwiseRun, Calls, record_calls
from .fit import describe_block
from .forms import Form, replace_block_
from .measure import Metric, Price, agreement, class_dim, iter_outputs, stored_outputs
from .recognise import Recognition
from .replacement_fit import fit_block, num_map_inputs

Quantity = Literal["latency", "parameters", "flops", "blocks"]
EXAMPLES = "'latency<=75%', 'parameters<=60%', 'flops<=70%', 'blocks=12', names of blocks or a Plan"


@dataclass(frozen=True, slots=True)
class Goal:
    """What to reach: at most a share of a quantity, a number of removed blocks, or the names of blocks."""

    quantity: str = "blocks"
    at_most: float = 0.0  # the share, or the number of blocks
    names: tuple[str, ...] = ()
    removal: frozenset[str] = frozenset()  # names for which a plan has the operator Removal


def read_budget(given: Any) -> Goal:
    """The goal of a user's budget; ReplearnError says how to write one."""
    if isinstance(given, Plan):
        bare = frozenset(target.name for target in given.targets if target.operator.name == "removal")
        return Goal(names=tuple(target.name for target in given.targets), removal=bare)
    if isinstance(given, str) and re.fullmatch(r"[\w, ]+\.[\w., ]+", given):  # names have dots
        given = [name.strip() for name in given.split(",")]
    if isinstance(given, str):
        with suppress(ReplearnError):  # its message lists budgets that are not allowed here
            first, *more = as_budgets(given)
            if not more and (first.quantity == "blocks" or (first.share and first.quantity in get_args(Quantity))):
                return Goal(first.quantity, first.at_most)
    elif isinstance(given, Sequence) and given and all(isinstance(name, str) for name in given):
        if len(set(given)) < len(given):
            raise ReplearnError(f"budget={list(given)!r} names a block twice; a block goes once.")
        return Goal(names=tuple(given))
    raise ReplearnError(f"budget={given!r} can't be read: write {EXAMPLES}.")


SAMPLES = 48  # for fitting while choosing, and as many for scoring
MIN_DECISIONS = 1000  # with fewer, divergences rank blocks by chance
SCORING_SAMPLES = 128  # with few decisions
MAX_MAP_INPUTS = 1536  # of a full map that is fitted while choosing


@dataclass(frozen=True, slots=True)
class Step:
    """One removed block: the held-out damage after it, and what removal of the blocks so far saves."""

    name: str
    damage: float
    saved: Price


@dataclass(frozen=True, slots=True)
class Choice:
    """The blocks in the order of their removal; `print` shows a table."""

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
    """Removes blocks from a copy of the model one by one, greedily by the least damage per saving.

    While choosing, a map fitted to a few samples replaces a block. Damage is measured on held-out samples: what
    the metric loses, the divergence from the model, or with few decisions the squared error of the logits, which
    has less noise on few samples. Scores are updated lazily: a block is removed when its fresh score is the least.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        found: Recognition,
        data: Data,
        block_costs: BlockCosts,
        quantity: str,
        metric: Metric | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.model, self.found, self.quantity = model, found, quantity
        self.metric, self.progress = metric, progress
        self.data = subset(data, SAMPLES)
        self.teacher_outputs = stored_outputs(model, self.data, self.data.held_out())
        num_decisions = sum(logits.numel() // logits.shape[class_dim(logits)] for logits in self.teacher_outputs)
        self.few_decisions = num_decisions < MIN_DECISIONS
        if self.few_decisions:
            self.data = subset(data, SAMPLES, SCORING_SAMPLES)
            self.teacher_outputs = stored_outputs(model, self.data, self.data.held_out())
        self.student = own_copy(model, share=True)
        self.teacher_calls = teacher_calls_of(model, found, self.data)
        self.form = choosing_form(model, found, self.teacher_calls)
        self.savings = {name: block_costs.cost(name) for name in found.candidates}
        self.initial_metric = metric(model) if metric is not None else 0.0
        self.remaining = list(found.candidates)
        self.steps: list[Step] = []
        self._scores: dict[str, tuple[float, float, nn.Module]] = {}

    @property
    def choice(self) -> Choice:
        return Choice(tuple(self.steps), self.quantity)

    def names(self, number: int) -> list[str]:
        """The first blocks to remove, at most so many."""
        while len(self.steps) < number and self.remove_next():
            pass
        return [step.name for step in self.steps[:number]]

    @torch.no_grad()
    def remove_next(self) -> bool:
        """Remove one more block; False if none can be removed."""
        if not self.remaining:
            return False
        before = self.steps[-1] if self.steps else Step("", 0.0, Price(0, 0, 0))
        fresh: set[str] = set()
        while True:
            unscored = [name for name in self.remaining if name not in self._scores]
            name = unscored[0] if unscored else min(self.remaining, key=lambda item: self._scores[item][0])
            if name in fresh:
                break
            damage_after, replacement = self._score_without(name)
            saving = 1.0 if self.quantity == "blocks" else max(self.savings[name].of(self.quantity), 1e-30)
            self._scores[name] = (max(damage_after - before.damage, 0.0) / saving, damage_after, replacement)
            fresh.add(name)
            if self.progress is not None:
                self.progress(f"scored {name}")
        _, damage, replacement = self._scores.pop(name)
        set_submodule(self.student, name, replacement)
        self.remaining.remove(name)
        self.steps.append(Step(name, damage, before.saved + self.savings[name]))
        return True

    def _score_without(self, name: str) -> tuple[float, nn.Module]:
        calls: Calls = record_calls(self.student, name, self.data)
        block = self.model.get_submodule(name)
        loaded = self.data.offloader.loaded
        with loaded(self.student.get_submodule(name)), loaded(block):
            replaced = describe_block(self.student, name, calls)
            replacement, _, _ = fit_block(replaced, self.form, block, self.teacher_calls[name], calls, 8)
        replacement.to(device_of(self.model))
        replace_block_(self.student, name, replacement)
        try:
            return self._damage(), replacement
        finally:
            set_submodule(self.student, name, replaced.block)

    def _damage(self) -> float:
        now = agreement(self.teacher_outputs, iter_outputs(self.student, self.data, self.data.held_out()))
        damage = now.error if self.few_decisions else now.divergence
        return damage if self.metric is None else (self.initial_metric - self.metric(self.student)) + 1e-3 * damage


def choosing_form(model: nn.Module, found: Recognition, teacher_calls: Mapping[str, Calls]) -> Form:
    """The form that replaces blocks while choosing: a full map, or 'channels' if that is too large."""
    sizes = [num_map_inputs(model.get_submodule(b.name), b.structure, teacher_calls[b.name][0].arguments.x)
             for b in found.blocks if not b.kept]  # fmt: skip
    return "full" if max(sizes, default=0) <= MAX_MAP_INPUTS else "channels"


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
    """Choose at most `number` blocks to remove, each by the least damage per saving."""
    chooser = Chooser(model, found, data, BlockCosts(model, found, data, 8), quantity, metric, progress)
    chooser.names(number)
    return chooser.choice


def teacher_calls_of(model: nn.Module, found: Recognition, data: Data) -> dict[str, Calls]:
    """The calls of every candidate in the model."""
    run = BlockwiseRun(model, model, found.order, data)
    calls = {run.name: run.teacher_calls}
    while run.advance():
        calls[run.name] = run.teacher_calls
    return {name: calls[name] for name in found.candidates}


def check_names(names: Sequence[str], found: Recognition) -> None:
    """Refuse names that are not blocks, and blocks that can't be removed."""
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
