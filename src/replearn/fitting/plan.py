"""`replearn.plan`: decide everything about a replacement, by a placement or by a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..costs.budgets import Budget
from ..costs.machines import Machine
from ..errors import ReplearnError
from ..operators._base.options import Options, options_named
from ..planning import planner
from ..planning.data import Plan
from .choose import place


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
      'memory<=80%' or 'time<=80%' (of a training step), instead of these. All but parameters and blocks need an
      `example`, a batch as the model takes it, of which only the shapes count; latency and time a `machine` too.
    - `score`, `data`: the damage of a block, of which a budget does the least: 'count' (each the same),
      'similarity' or 'error' on batches of `data`, or your own numbers by block name.
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
    return place(model, budget, example, score=score, data=data, operator=options, machine=machine).plan
