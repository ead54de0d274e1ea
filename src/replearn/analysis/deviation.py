"""Local errors of the operators, how far outputs are from the full model's, and the trade-off of K."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.running import differentiable_attention
from ..compression.measure import flops_of
from ..errors import ReplearnError
from ..fitting.calibrate import calibrate_
from ..fitting.observe import observe
from ..operators._base.options import Options
from ..operators.removal import Removal
from ..planning.data import Plan, Target
from ..planning.planner import plan as plan_model
from ..surgery.replace import replace_
from .results import Deviation, LocalError, Quality, Suffix, TradeoffPoint
from .subject import Subject, exchanged, lengths


@torch.no_grad()
def local_error(subject: Subject, target: Target, *, together: bool) -> LocalError:
    """epsilon_r over the held-out samples, on the full model's activations or behind earlier replacements."""
    operator = subject.replaced.get_submodule(target.name)
    model = subject.replaced if together else subject.full
    rows: list[Tensor] = []
    with exchanged(model, target.name, subject.full.get_submodule(target.name)):
        for seen in observe(model, target, subject.held, subject.forward, split=False):
            parts = seen.through(operator) - seen.y, seen.x - seen.y, seen.x
            rows.append(torch.stack([lengths(part) for part in parts]))
    wrong, removed, height = torch.cat(rows, dim=1)
    ratios, branch = wrong / height.clamp_min(1), float(removed.square().sum())
    return LocalError(
        epsilon=float(ratios.max()),
        absolute=float(wrong.max()),
        relative=float(wrong.square().sum()) / branch if branch else 0.0,
        removal=float((removed / height.clamp_min(1)).max()),
        height=float(height.max()),
    )


@torch.no_grad()
def deviation(subject: Subject, model: nn.Module, parts: Sequence[tuple[LocalError, Suffix]]) -> Deviation:
    """Measured on the held-out batches; the bounds add up the local errors times what amplifies them."""
    far, relative, agreement = differences(subject, model)
    return Deviation(
        measured=float(far.max()),
        mean=float(far.mean()),
        relative=relative,
        agreement=agreement,
        bound=sum(suffix.factor * local.epsilon * max(local.height, 1) for local, suffix in parts),
        sharp=sum(suffix.factor * local.absolute for local, suffix in parts),
        printed=sum(suffix.product * local.epsilon * max(local.height, 1) for local, suffix in parts),
    )


@torch.no_grad()
def differences(subject: Subject, model: nn.Module) -> tuple[Tensor, float, float]:
    """Each sample's |F_RepL - F|, the relative deviation, and the share of equal predictions."""
    far, size = [], []
    same = count = 0
    for number, full in enumerate(subject.reference):
        made = subject.output(model, number)
        far.append(lengths(made - full))
        size.append(lengths(full))
        same += int((made.argmax(-1) == full.argmax(-1)).sum())
        count += full.argmax(-1).numel()
    distance = torch.cat(far)
    power = float(torch.cat(size).square().sum()) or 1.0
    return distance, float((distance.square().sum() / power).sqrt()), same / count


@torch.no_grad()
def quality(subject: Subject, model: nn.Module) -> Quality:
    """Deviation, mean loss and, where one was given, mean score over the held-out batches."""
    losses, scores = [], []
    for number, batch in enumerate(subject.held):
        made = subject.output(model, number)
        losses.append(float(subject.mean_loss(made, number)))
        if subject.score is not None:
            scores.append(float(subject.score(made, batch)))
    _, relative, agreement = differences(subject, model)
    score = sum(scores) / len(scores) if scores else None
    return Quality(relative=relative, agreement=agreement, loss=sum(losses) / len(losses), score=score)


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
    subject: Subject, data: Iterable[Any], plan: Plan, interval: int, first: int, whole: float, fit: bool
) -> TradeoffPoint:
    model = subject.fresh()
    if fit:
        calibrate_(model, plan, data, correction="none", forward=subject.forward)
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


def count_flops(subject: Subject, model: nn.Module) -> float:
    """FLOPs of a forward pass on one held-out batch."""
    with differentiable_attention():
        return flops_of(lambda: subject.output(model, 0))
