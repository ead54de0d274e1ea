"""The trade-off of the interval K: what each saves, and what it costs before any training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..errors import ReplearnError
from ..fitting.calibrate import calibrate_
from ..fitting.gauss_newton import differentiable_attention
from ..operators._base.options import Options
from ..operators.removal import Removal
from ..planning.data import Plan
from ..planning.planner import plan as plan_model
from ..surgery.replace import replace_
from .deviation import quality
from .results import TradeoffPoint
from .subject import Subject


def tradeoff(
    subject: Subject,
    data: Iterable[Any],
    intervals: Sequence[int],
    first: int | None,
    operator: Options | None,
    fit: bool,
) -> tuple[TradeoffPoint, ...]:
    """A point for every interval that has a target; the operators are fitted anew for each."""
    points = []
    whole = count_flops(subject, subject.full)
    model = subject.fresh()
    for interval in intervals:
        try:
            plan = plan_model(model, interval, first or interval, operator=operator)
        except ReplearnError:
            if interval < 2:
                raise
            continue  # no stack is long enough for this interval
        points.append(_point(subject, data, plan, interval, first or interval, whole, fit))
    return tuple(points)


def _point(
    subject: Subject, data: Iterable[Any], plan: Plan, interval: int, first: int, whole: int, fit: bool
) -> TradeoffPoint:
    model = subject.fresh()
    if fit:
        calibrate_(model, plan, data, forward=subject.forward)
    else:
        replace_(model, plan).eval()
    removal = subject.fresh()
    gone = plan_model(removal, targets=[target.name for target in plan.targets], operator=Removal())
    replace_(removal, gone).eval()
    flops, floor = count_flops(subject, model), count_flops(subject, removal)
    eta = (flops - floor) / (whole - floor) if whole > floor else 0.0
    return TradeoffPoint(
        interval=interval,
        first=first,
        targets=len(plan.targets),
        parameters=plan.parameters_after / plan.parameters_before if plan.parameters_before else 1.0,
        flops=flops / whole if whole else 1.0,
        cost_formula=1 - (1 - eta) / interval,
        eta=eta,
        operators=quality(subject, model),
        removal=quality(subject, removal),
    )


@torch.no_grad()
def count_flops(subject: Subject, model: nn.Module) -> int:
    """FLOPs of a forward pass on one held-out batch."""
    counter = FlopCounterMode(display=False)
    with counter, differentiable_attention():
        subject.output(model, 0)
    return int(counter.get_total_flops())
