"""`replearn.plan`: decide everything about a replacement, by a placement or by a budget."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from ..costs.budgets import Budget, as_budgets
from ..costs.data import Cost
from ..costs.estimator import Terms, cost_of, replaced_copy
from ..costs.machines import Machine
from ..errors import ReplearnError
from ..operators._base.options import Options, options_named
from ..planning import planner
from ..planning.data import Plan, Target
from ..planning.legality import Survey
from ..planning.positions import best_nonadjacent
from .observe import block_similarity

SCORES = ("count", "similarity")


def plan(
    model: nn.Module,
    interval: int = 4,
    first: int | None = None,
    *,
    fraction: float | None = None,
    targets: Sequence[str] | None = None,
    operator: Options | str | None = None,
    budget: Budget | str | Sequence[Budget | str] | None = None,
    example: Any = None,
    score: str | Mapping[str, float] = "count",
    data: Any = None,
    machine: Machine | None = None,
) -> Plan:
    """Plan which blocks of a model to replace; the model stays bit-identical, and may be on meta.

    - `interval`, `first`: the placement r = first, first + K, ... in every stack. If `first` is not given, it is
      K, and 2 in a stack where K takes at most one block and 2 takes more. `first=interval` is the paper's rule.
    - `fraction`: a share of all blocks, spread evenly, instead of an interval.
    - `targets`: the names of the blocks, instead of either.
    - `budget`: 'latency<=75%', 'parameters<=60%', 'flops<=70%' (once deployed, as in `compress`), 'blocks=12',
      'memory<=80%' or 'time<=80%' (of a training step), instead of these: the fewest blocks that meet it, or all
      of several. All but parameters and blocks need an `example`, a batch as the model takes it, of which only
      the shapes count; latency and time a `machine` too.
    - `score`, `data`: which blocks a budget takes: 'count' spreads them evenly, 'similarity' takes those that
      change their input least on the first batch of `data`, your own numbers by block name (the damage) those of
      the least sum. For a trained model `compress` measures the damage of each choice instead.
    - `operator`: options from `replearn.operators`, or a name as 'reduced_bottleneck'; by default the paper's for
      the kind of block.

    Raises ReplearnError for what can't be honoured. With an interval or a fraction, a block that has to be
    kept is listed in `plan.skipped`; a block that you name and that has to be kept is an error.

    >>> import replearn
    >>> plan = replearn.plan(replearn.models.resnet32())
    >>> [target.name for target in plan.targets]
    ['layer1.3', 'layer2.3', 'layer3.3']
    >>> replearn.plan(replearn.models.resnet32(), budget="parameters<=80%").placement
    'budget parameters<=80%, by count'
    """
    if budget is None:
        if data is not None or score != "count":
            raise ReplearnError("score and data say which blocks a budget takes; give budget= too.")
        return planner.plan(model, interval, first, fraction=fraction, targets=targets, operator=operator)
    if (interval, first, fraction, targets) != (4, None, None, None):
        raise ReplearnError("budget chooses the targets; leave out interval, first, fraction and targets.")
    options = options_named(operator) if isinstance(operator, str) else operator
    return plan_within(model, as_budgets(budget), example, options, Terms(machine=machine), score, data)


def plan_within(
    model: nn.Module,
    budgets: Sequence[Budget],
    example: Any,
    operator: Options | None,
    terms: Terms,
    score: str | Mapping[str, float] = "count",
    data: Any = None,
) -> Plan:
    """The plan of the fewest targets whose predicted cost meets every budget; see `plan`."""
    check_terms(budgets, example, terms)
    stacks = planner.stacks_of(model)
    survey = Survey(model, stacks, operator)
    legal = [target for stack in stacks for target in survey.at(stack, survey.legal(stack))]
    if not legal:
        planner.plan(model, 2, 2, operator=operator)  # says why there are none
    damage = None if score == "count" else damages(model, legal, score, data)
    num_blocks = len(survey.places)
    batch = None if all(budget.quantity in ("parameters", "blocks") for budget in budgets) else example
    before = replace(cost_of(model, batch, terms).total, blocks=num_blocks)
    if all(budget.met(before, before) for budget in budgets):
        now = "; ".join(f"{budget}: it takes {budget.spell(budget.measure(before))}" for budget in budgets)
        raise ReplearnError(f"{type(model).__name__} meets its budget already, so nothing has to go ({now}).")

    by = score if isinstance(score, str) else "given scores"
    placement = f"budget {', '.join(map(str, budgets))}, by {by}"

    def planned(count: int) -> Plan:
        if damage is None:
            chosen = survey.spread(count)
        else:
            taken = best_nonadjacent(list(survey.places), {name: -value for name, value in damage.items()}, count)
            chosen = [target for target in legal if target.name in taken]
        return planner.plan_of_targets(model, chosen, placement, num_blocks, notes=survey.notes(chosen))

    @cache
    def cost(count: int) -> Cost:
        found = cost_of(replaced_copy(model, planned(count)), batch, terms).total
        return replace(found, blocks=num_blocks - count)

    counts = range(1, survey.most() + 1)
    index = bisect_left(counts, True, key=lambda n: all(budget.met(cost(n), before) for budget in budgets))
    if index == len(counts):
        notes = "".join(f" Note: {note}." for note in survey.notes(legal))
        raise ReplearnError(unreachable(model, budgets, before, cost(index), index) + notes)
    return planned(counts[index])


def check_terms(budgets: Sequence[Budget], example: Any, terms: Terms) -> None:
    """Refuse budgets whose prediction needs a machine or a batch that is missing."""
    for budget in budgets:
        if terms.machine is None and budget.quantity in ("time", "latency"):
            raise ReplearnError(
                f"budget='{budget}' needs to know the machine: give machine=replearn.costs.named_machine('H100'), "
                "or machine=replearn.costs.probe() on the machine itself."
            )
        if example is None and budget.quantity not in ("parameters", "blocks"):
            raise ReplearnError(
                f"budget='{budget}' needs an example: a batch as the model takes it, as "
                "example=torch.empty(64, 3, 224, 224)."
            )


def damages(
    model: nn.Module, legal: Sequence[Target], score: str | Mapping[str, float], data: Any
) -> dict[str, float]:
    """The damage of every legal target, by name."""
    names = [target.name for target in legal]
    if isinstance(score, Mapping):
        if missing := [name for name in names if name not in score]:
            raise ReplearnError(f"score gives no number for {', '.join(missing[:5])}; name every legal target.")
        found = {name: float(score[name]) for name in names}
    elif score not in SCORES:
        raise ReplearnError(f"score={score!r}: write one of {', '.join(SCORES)}, or numbers by block name.")
    elif data is None:
        raise ReplearnError(f"score={score!r} needs data: a list of batches, as the model takes them.")
    else:
        similar = block_similarity(model, {t.name: t.anatomy.input for t in legal}, first_batch(data))
        found = {name: 1 - similar[name] for name in names}
    if wrong := [name for name, number in found.items() if not abs(number) < float("inf")]:
        raise ReplearnError(f"The score of {wrong[0]} is {found[wrong[0]]}; damages are finite numbers.")
    return found


def first_batch(data: Any) -> Any:
    """The first batch of a list or loader; a tensor or a dict is a batch itself."""
    if isinstance(data, Mapping) or not isinstance(data, Iterable) or hasattr(data, "shape"):
        return data
    for batch in data:
        return batch
    raise ReplearnError("The calibration data is empty: give at least one batch.")


def unreachable(model: nn.Module, budgets: Sequence[Budget], before: Cost, cheapest: Cost, most: int) -> str:
    """The message that no number of targets meets the budgets, with what can be reached."""
    parts = []
    for budget in budgets:
        now, after = budget.measure(before), budget.measure(cheapest)
        asked = f"{budget} asks for {budget.spell(budget.limit(before))} of {budget.spell(now)}"
        reached = f"{most} targets, the most that can go, bring it to {budget.spell(after)} ({after / now:.1%})"
        can_go = f"{budget}, and at most {most} of {now:.0f} can go"
        parts.append(can_go if budget.quantity == "blocks" else f"{asked}, and {reached}")
    return (
        f"No choice of targets of this {type(model).__name__} meets the budget: {'; '.join(parts)}. Ask for less, "
        "or take a lighter operator; operator='removal' is the floor."
    )
