"""Choose the targets that meet a budget with the least predicted damage, and say why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..costs.budgets import Budget, as_budgets
from ..costs.data import Cost, ModelCost, Promise
from ..costs.estimator import Terms, cost_of, replaced_double, shapes_of
from ..costs.machines import Machine
from ..errors import ReplearnError
from ..operators._base.options import Options
from ..planning.data import Plan, Target
from ..planning.legality import Survey
from ..planning.planner import plan as plan_targets
from ..planning.planner import stacks_of
from ..planning.table import shown, text_table
from .closed_form import fitted_errors
from .knapsack import Item, choose, most_saved
from .observe import block_similarity

SCORES = ("count", "similarity", "error")
ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A block that may go: what its replacement saves, what it is predicted to hurt, and whether it was chosen."""

    name: str
    stack: str
    position: int
    damage: float
    saves: Cost
    chosen: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """A plan that meets its budgets, and why it is this one; `print` shows both."""

    plan: Plan
    promise: Promise
    budgets: tuple[Budget, ...]
    score: str
    candidates: tuple[Candidate, ...]
    reachable: tuple[float, ...]  # the least of each budget's quantity that any plan comes to

    def __str__(self) -> str:
        head = ("module", "position", "damage", *(f"saves {budget.quantity}" for budget in self.budgets), "")
        whole = self.promise.before.total
        rows = [
            (
                shown(candidate.name),
                str(candidate.position),
                f"{candidate.damage:.4g}",
                *(_share(budget.measure(candidate.saves), budget.measure(whole)) for budget in self.budgets),
                "replaced" if candidate.chosen else "",
            )
            for candidate in self.candidates
        ]
        chosen = [candidate for candidate in self.candidates if candidate.chosen]
        lines = [
            f"{len(chosen)} of {len(rows)} legal targets, the least total damage "
            f"({sum(candidate.damage for candidate in chosen):.4g} by {self.score}) that meets the budget",
            "",
            *text_table(head, rows, right=range(1, 3 + len(self.budgets))),
            "",
        ]
        for budget, least in zip(self.budgets, self.reachable, strict=True):
            before, after = (budget.measure(cost.total) for cost in (self.promise.before, self.promise.after))
            lines.append(
                f"budget   {budget}: {budget.spell(before)} -> {budget.spell(after)} ({after / before:.1%}); the "
                f"least that is reachable is {budget.spell(least)} ({least / before:.1%})"
            )
        return "\n".join([*lines, "", str(self.promise)])


def place(
    model: nn.Module,
    budget: Budget | str | Sequence[Budget | str],
    example: Any,
    *,
    score: str | Mapping[str, float] = "count",
    data: Any = None,
    operator: Options | None = None,
    optimizer: str = "adamw",
    precision: str = "float32",
    machine: Machine | None = None,
) -> Placement:
    """Choose the targets that meet a budget with the least predicted damage; the model is not touched.

    - `budget`: `"parameters<=60M"`, `"memory<=75%"`, `Budget("memory", 0.75)`, or several, which must all be met.
      A budget of latency or time needs a `machine`. `example` may be None for parameters and blocks.
    - `score`: the damage of a target: `"count"` (each the same), `"similarity"` (how much the block changes its
      input, on the first batch of `data`), `"error"` (what its fitted operator leaves unexplained on held-out
      batches of `data`), or your own numbers by block name.
    - the rest is as in `estimate`.

    Raises ReplearnError for a budget that can't be met, saying what can be reached, and for one that is met.

    >>> import torch, replearn
    >>> model, images = replearn.models.resnet32(), torch.empty(64, 3, 32, 32, device="meta")
    >>> placement = replearn.fitting.place(model, "parameters<=400K", images)
    >>> placement.plan.parameters_after <= 400_000
    True
    """
    budgets, by = as_budgets(budget), score if isinstance(score, str) else "given scores"
    for found in budgets:
        if machine is None and found.quantity in ("time", "latency"):
            raise ReplearnError(
                f"budget='{found}' needs to know the machine: give machine=replearn.costs.named_machine('H100'), "
                "or machine=replearn.costs.probe() on the machine itself."
            )
        if example is None and found.quantity not in ("parameters", "blocks"):
            raise ReplearnError(
                f"budget='{found}' needs an example: a batch as the model takes it, as "
                "example=torch.empty(64, 3, 224, 224)."
            )
    stacks = stacks_of(model)
    survey = Survey(model, stacks, operator)
    legal = [target for stack in stacks for target in survey.at(stack, survey.legal(stack))]
    if not legal:
        plan_targets(model, 2, 2, operator=operator)  # says why there are none
        raise ReplearnError(f"{type(model).__name__} has no block that can be replaced.")

    terms = Terms(optimizer, precision, machine)
    blocks = [name for stack in stacks for name in stack.blocks]

    def planned(names: Sequence[str]) -> tuple[Plan, ModelCost]:
        made = plan_targets(model, targets=names, operator=operator)
        return made, cost_of(replaced_double(model, made), example, blocks, terms)

    before = cost_of(model, example, blocks, terms)
    saves = _savings(legal, before, planned)
    damage = _damages(model, legal, score, data)
    whole = before.total
    rows = [[target for target in legal if target.stack == stack.name] for stack in stacks]
    items = [
        [
            Item(target.position, damage[target.name], tuple(b.measure(saves[target.name]) for b in budgets))
            for target in row
        ]
        for row in rows
    ]
    wanted = [found.measure(whole) - found.limit(whole) for found in budgets]
    if all(need <= 0 for need in wanted):
        now = "; ".join(f"{found}: it takes {found.spell(found.measure(whole))}" for found in budgets)
        raise ReplearnError(f"{type(model).__name__} meets its budget already, so nothing has to go ({now}).")
    most = [most_saved(items, i) for i in range(len(budgets))]
    reachable = tuple(found.measure(whole) - saved for found, (saved, _) in zip(budgets, most, strict=True))
    needs = list(wanted)
    for _ in range(ATTEMPTS):
        picked = choose(items, needs)
        if picked is None:
            break
        names = [rows[stack][index].name for stack, index in picked]
        if score == "count" and [found.quantity for found in budgets] == ["blocks"]:
            names = [target.name for target in survey.spread(len(names))]
        plan, after = planned(names)
        short = [found.measure(after.total) - found.limit(whole) for found in budgets]
        if all(missing <= 0 for missing in short):
            chosen = {target.name for target in plan.targets}
            return Placement(
                plan=replace(plan, placement=f"budget {', '.join(map(str, budgets))}, by {by}"),
                promise=Promise(before, after, precision, optimizer, machine, shapes_of(example)),
                budgets=budgets,
                score=by,
                candidates=tuple(
                    Candidate(t.name, t.stack, t.position, damage[t.name], saves[t.name], t.name in chosen)
                    for t in legal
                ),
                reachable=reachable,
            )
        # savings of single blocks don't add up to the last byte: ask for what is missing on top
        needs = [need + max(0.0, missing) * 1.001 for need, missing in zip(needs, short, strict=True)]
    reason = _unreachable(model, budgets, whole, reachable, [number for _, number in most], len(legal))
    raise ReplearnError(" ".join([reason, *(f"Note: {note}." for note in survey.notes(legal))]))


def _savings(
    legal: Sequence[Target], before: ModelCost, planned: Callable[[Sequence[str]], tuple[Plan, ModelCost]]
) -> dict[str, Cost]:
    """What each target saves. No two neighbours go at once, so two plans see every operator."""
    found: dict[str, Cost] = {}
    for parity in (0, 1):
        names = [target.name for target in legal if target.position % 2 == parity]
        if names:
            _, after = planned(names)
            found |= {name: before.of(name) - after.of(name) for name in names}
    return found


def _damages(
    model: nn.Module, legal: Sequence[Target], score: str | Mapping[str, float], data: Any
) -> dict[str, float]:
    names = [target.name for target in legal]
    if isinstance(score, Mapping):
        missing = [name for name in names if name not in score]
        if missing:
            raise ReplearnError(f"score gives no number for {', '.join(missing[:5])}; name every legal target.")
        found = {name: float(score[name]) for name in names}
    elif score == "count":
        found = dict.fromkeys(names, 1.0)
    elif score not in SCORES:
        raise ReplearnError(f"score={score!r}: write one of {', '.join(SCORES)}, or numbers by block name.")
    elif data is None:
        raise ReplearnError(f"score={score!r} needs data: a list of batches, as the model takes them.")
    elif score == "error":
        found = {fit.name: fit.error * fit.share for fit in fitted_errors(model, legal, data)}
    else:
        similar = block_similarity(model, {t.name: t.anatomy.input for t in legal}, _first(data))
        found = {name: 1 - similar[name] for name in names}
    wrong = [name for name, number in found.items() if not abs(number) < float("inf")]
    if wrong:
        raise ReplearnError(f"The score of {wrong[0]} is {found[wrong[0]]}; damages are finite numbers.")
    return found


def _first(data: Any) -> Any:
    """The first batch of a list or loader; a tensor or a dict is a batch itself."""
    if isinstance(data, Mapping) or not isinstance(data, Iterable) or hasattr(data, "shape"):
        return data
    for batch in data:
        return batch
    raise ReplearnError("The calibration data is empty: give at least one batch.")


def _unreachable(
    model: nn.Module,
    budgets: Sequence[Budget],
    whole: Cost,
    reachable: Sequence[float],
    numbers: Sequence[int],
    legal: int,
) -> str:
    """What can be reached instead, for each budget alone."""
    parts = []
    for budget, least, number in zip(budgets, reachable, numbers, strict=True):
        now = budget.measure(whole)
        if budget.quantity == "blocks":
            parts.append(f"{budget}, and at most {now - least:.0f} of {now:.0f} can go")
            continue
        parts.append(
            f"{budget} asks for {budget.spell(budget.limit(whole))} of {budget.spell(now)}, and the least that "
            f"can be reached is {budget.spell(least)} ({least / now:.1%}, {number} of {legal} legal targets)"
        )
    alone = all(least <= budget.limit(whole) for budget, least in zip(budgets, reachable, strict=True))
    together = " Each alone can be met, and not all at once." if alone and len(budgets) > 1 else ""
    return (
        f"No choice of targets of this {type(model).__name__} meets the budget: {'; '.join(parts)}.{together} "
        "Ask for less, or take a lighter operator; operators.Removal() is the floor."
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0%"
