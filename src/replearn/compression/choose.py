"""The door `choose`: which blocks go, one after another, each by the least damage for what it saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import ReplearnError
from ..planning.table import shown, text_table
from ..planning.validate import own_copy
from ..surgery.replace import set_submodule
from .batches import Batch, Data, cut
from .fit import place_of
from .measure import Cost, Metric, agreement, block_cost, outputs
from .recognise import Recognition
from .stand_ins import fit_block
from .walking import Visit, Walk, visits

SAMPLES = 48  # for fitting while choosing, and as many for scoring


@dataclass(frozen=True, slots=True)
class Step:
    """One block that goes: the damage after it on held-out samples, and what the blocks so far save by removal."""

    name: str
    damage: float
    saved: Cost


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


@torch.no_grad()
def choose(
    model: nn.Module,
    found: Recognition,
    data: Data,
    *,
    quantity: str,
    enough: Callable[[Sequence[str], Cost], bool],
    metric: Metric | None = None,
    progress: Callable[[str], None] | None = None,
) -> Choice:
    """Take blocks out of a copy until it is enough: always the one with the least damage for what it saves.

    While choosing, a full map fitted to a few samples stands for a block. Damage is the divergence from the
    untouched model on others, or what the metric loses. Scores are renewed only where they could matter: a block
    is taken when its fresh score is still the least.
    """
    few = subset(data, SAMPLES)
    held = few.held()
    taught = outputs(model, few, held)
    working = own_copy(model)
    aims = all_visits(model, found, few)
    saves = {name: block_cost(model.get_submodule(name), aims[name][0].arguments) for name in found.candidates}
    top = metric(model) if metric is not None else 0.0

    def damage_of(trial: nn.Module) -> float:
        gap = agreement(taught, outputs(trial, few, held)).divergence
        return gap if metric is None else (top - metric(trial)) + 1e-3 * gap

    def tried(name: str) -> tuple[float, nn.Module]:
        now: list[Visit] = visits(working, name, few)
        place = place_of(working, name, now, found.way)
        made, _, _ = fit_block(place, "full", model.get_submodule(name), aims[name], now, 8)
        set_submodule(working, name, made)
        try:
            return damage_of(working), made
        finally:
            set_submodule(working, name, place.block)

    steps: list[Step] = []
    saved, damage, left = Cost(0, 0, 0), 0.0, list(found.candidates)
    scores: dict[str, tuple[float, float, nn.Module]] = {}
    while not enough([step.name for step in steps], saved):
        if not left:
            return Choice(tuple(steps), quantity)
        fresh: set[str] = set()
        while True:
            unscored = [name for name in left if name not in scores]
            name = unscored[0] if unscored else min(left, key=lambda item: scores[item][0])
            if name in fresh:
                break
            after, made = tried(name)
            gain = 1.0 if quantity == "blocks" else max(saves[name].of(quantity), 1e-30)
            scores[name] = (max(after - damage, 0.0) / gain, after, made)
            fresh.add(name)
            if progress is not None:
                progress(f"scored {name}")
        _, damage, made = scores.pop(name)
        set_submodule(working, name, made)
        left.remove(name)
        saved = saved + saves[name]
        steps.append(Step(name, damage, saved))
    return Choice(tuple(steps), quantity)


def all_visits(model: nn.Module, found: Recognition, data: Data) -> dict[str, list[Visit]]:
    """The calls of every candidate in the untouched model."""
    walk = Walk(model, model, found.way, data)
    calls = {walk.name: walk.teacher}
    while walk.advance():
        calls[walk.name] = walk.teacher
    return {name: calls[name] for name in found.candidates}


def subset(data: Data, most: int) -> Data:
    """So many samples for fitting and as many held-out ones."""
    kept: list[Batch] = []
    for held_out in (False, True):
        count = 0
        for batch in data.batches:
            if batch.held_out == held_out and count < most:
                size = min(batch.size, most - count)
                kept.append(Batch(cut(batch.inputs, batch.size, 0, size), held_out, size))
                count += size
    return Data(tuple(kept), data.forward, sum(batch.size for batch in kept))


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
