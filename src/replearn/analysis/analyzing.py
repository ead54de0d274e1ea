"""Analyse what a plan would do to a trained model."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.running import call, unchanged
from ..blocks.stacks import find_stacks
from ..errors import ReplearnError
from ..fitting.calibrate import calibrate_
from ..fitting.observe import Forward
from ..operators._base.options import Options
from ..planning.data import Plan, Target
from ..planning.validate import refuse_wrapped
from ..surgery.replace import check_fit, exchange_, plan_of
from .deviation import deviation, quality
from .gradients import gradient_bias
from .local import local_error
from .recoverability import distances
from .results import Analysis, Deviation, LocalError, Suffix, TargetAnalysis
from .subject import Loss, Score, Subject, finite_output, held_out
from .suffix import products_after, suffix_factor
from .tradeoff import tradeoff

INTERVALS = (2, 3, 4, 6, 8)
ESTIMATES = "suffix factors are estimates from sampled points by power iteration, not guarantees"


def analyze(
    model: nn.Module,
    plan: Plan,
    data: Iterable[Any],
    *,
    forward: Forward | None = None,
    loss: Loss | None = None,
    score: Score | None = None,
    replaced: nn.Module | None = None,
    fit: bool = True,
    gradients: bool = True,
    intervals: Sequence[int] = INTERVALS,
    first: int | None = None,
    starts: int = 2,
    iterations: int = 30,
    seed: int = 0,
) -> Analysis:
    """Measure the paper's theory on a trained model: local errors, suffix factors, bounds, gradient bias.

    `data` is a list or loader of at least two batches, as `calibrate_` takes them; every fifth, beginning with
    the second, is held out, and everything is measured there. `loss(output, batch)` is for the gradients;
    without it the full model's own predictions are the labels. `score(output, batch)` is any number to show
    next to the deviation, as accuracy. The operators are fitted to the blocks on a copy, or start as they
    would in training with `fit=False`, or are those of `replaced`, a model of yours with this plan.

    The model is left as it was. Raises ReplearnError for a plan that does not fit it, a model whose blocks are
    gone already, data that does not fit, and NaN.
    """
    if not isinstance(plan, Plan):
        raise ReplearnError(
            f"analyze takes a Plan, got {type(plan).__name__}; make one with replearn.plan(model)."
        )
    refuse_wrapped(model)
    check_fit(model, plan)
    batches = list(data)
    held = held_out(batches)
    run = forward or call
    with unchanged(model):
        full = copy.deepcopy(model).requires_grad_(False)  # in eval mode here
    reference = tuple(_reference(full, batch, run, number) for number, batch in enumerate(held))
    other, notes = _replaced(full, plan, batches, run, replaced, fit)
    trainable = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    subject = Subject(full, other, plan, held, reference, run, loss, score, trainable)
    names = [name for stack in find_stacks(full) for name in stack.blocks]
    products = products_after(subject, names, starts=1, iterations=iterations, seed=seed)
    found = [
        _target(subject, target, products[target.name], starts=starts, iterations=iterations, seed=seed)
        for target in plan.targets
    ]
    together = deviation(subject, other, [(target.together, target.suffix) for target in found])
    own_loss, own_score = quality(subject, full)
    return Analysis(
        model=plan.model,
        placement=plan.placement,
        num_samples=sum(len(output) for output in reference),
        targets=tuple(found),
        together=together,
        gradient=gradient_bias(subject, together.bound, iterations=iterations, seed=seed) if gradients else None,
        tradeoff=tradeoff(subject, batches, intervals, first, _operator(plan), fit),
        loss=own_loss,
        score=own_score,
        notes=(ESTIMATES, *notes),
    )


@torch.no_grad()
def _reference(full: nn.Module, batch: Any, forward: Forward, number: int) -> Tensor:
    return finite_output(full, batch, forward, number)


def _replaced(
    full: nn.Module, plan: Plan, batches: list[Any], forward: Forward, given: nn.Module | None, fit: bool
) -> tuple[nn.Module, list[str]]:
    """The model with the blocks replaced, and what has to be said about how."""
    if given is not None:
        if plan_of(given) != plan:
            raise ReplearnError(
                "The replaced model was made with another plan. Pass the plan that it carries, or leave it out."
            )
        return copy.deepcopy(given).eval().requires_grad_(False), ["the operators are those of the given model"]
    other = copy.deepcopy(full)
    if not fit:
        exchange_(other, plan, start=True)
        return other.eval().requires_grad_(False), ["the operators have their starting values: nothing was fitted"]
    report = calibrate_(other, plan, batches, forward=forward)
    return other.eval().requires_grad_(False), [f"{fit.name}: {fit.note}" for fit in report.fits if fit.note]


def _target(
    subject: Subject, target: Target, product: float, *, starts: int, iterations: int, seed: int
) -> TargetAnalysis:
    alone = local_error(subject, target, together=False)
    together = local_error(subject, target, together=True)
    suffix = suffix_factor(
        subject, target, starts=starts, iterations=iterations, product=product, seed=seed + target.position
    )
    return TargetAnalysis(
        name=target.name,
        position=target.position,
        operator=target.operator.label(),
        alone=alone,
        together=together,
        suffix=suffix,
        deviation=_alone(subject, target, alone, suffix),
        distances=distances(subject.full, target),
    )


def _alone(subject: Subject, target: Target, local: LocalError, suffix: Suffix) -> Deviation:
    with subject.with_alone(target) as model:
        return deviation(subject, model, [(local, suffix)])


def _operator(plan: Plan) -> Options | None:
    """The plan's one operator; None, the default of every block, if it has several."""
    options = {target.operator for target in plan.targets}
    return options.pop() if len(options) == 1 else None
