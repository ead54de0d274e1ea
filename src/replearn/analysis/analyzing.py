"""Analyse what a plan changes in a trained model."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..blocks.running import call, unchanged
from ..blocks.stacks import find_stacks
from ..errors import ReplearnError
from ..fitting.calibrate import calibrate_
from ..fitting.observe import HELD_OUT, Forward
from ..planning.data import Plan, Target
from ..surgery.replace import check_fit
from .deviation import deviation, local_error
from .gradients import gradient_bias
from .recoverability import distances
from .results import Analysis, TargetAnalysis
from .subject import Loss, Subject, exchanged, finite_output
from .suffix import products_after, suffix_factor

ESTIMATES = "suffix factors are estimates from sampled points by power iteration, not guarantees"


def analyze(
    model: nn.Module,
    plan: Plan,
    data: Iterable[Any],
    *,
    forward: Forward = call,
    loss: Loss | None = None,
    gradients: bool = True,
    iterations: int = 30,
    seed: int = 0,
) -> Analysis:
    """Measure the paper's theory on a trained model: local errors, suffix factors, bounds, gradient bias.

    `data` is a list or loader of at least two batches, as `calibrate_` takes them; every fifth, beginning with
    the second, is held out, and everything is measured there. `loss(output, batch)` is for the gradients;
    without it the full model's own predictions are the labels. The operators are fitted to the blocks on a copy.

    The model is not changed. Raises ReplearnError for a plan that does not fit it, a model that is replaced
    already, data that does not fit, and NaN.
    """
    check_fit(model, plan)
    batches = list(data)
    if len(batches) < 2:
        raise ReplearnError(
            f"An analysis needs at least two batches, and got {len(batches)}: some are for fitting the operators, "
            "and every fifth, beginning with the second, is held out for the measurements."
        )
    held = tuple(batch for number, batch in enumerate(batches) if number % HELD_OUT == 1)
    with unchanged(model):
        full = copy.deepcopy(model).requires_grad_(False)  # in eval mode here
    with torch.no_grad():
        reference = tuple(finite_output(full, batch, forward, number) for number, batch in enumerate(held))
    replaced = copy.deepcopy(full)
    report = calibrate_(replaced, plan, batches, correction="none", forward=forward)
    notes = [f"{fit.name}: {fit.note}" for fit in report.fits if fit.note]
    replaced.eval().requires_grad_(False)
    subject = Subject(full, replaced, plan, held, reference, forward, loss)
    names = [name for stack in find_stacks(full) for name in stack.blocks]
    power = {"iterations": iterations, "seed": seed}
    products = products_after(subject, names, **power)
    found = [_target(subject, target, products[target.name], **power) for target in plan.targets]
    together = deviation(subject, replaced, [(target.together, target.suffix) for target in found])
    return Analysis(
        model=plan.model,
        placement=plan.placement,
        num_samples=sum(len(output) for output in reference),
        targets=tuple(found),
        together=together,
        gradient=gradient_bias(subject, together.bound, **power) if gradients else None,
        notes=(ESTIMATES, *notes),
    )


def _target(subject: Subject, target: Target, product: float, iterations: int, seed: int) -> TargetAnalysis:
    alone = local_error(subject, target, together=False)
    suffix = suffix_factor(subject, target, iterations=iterations, product=product, seed=seed + target.position)
    with exchanged(subject.full, target.name, subject.replaced.get_submodule(target.name)):
        deviated = deviation(subject, subject.full, [(alone, suffix)])
    return TargetAnalysis(
        name=target.name,
        position=target.position,
        operator=target.operator.label(),
        alone=alone,
        together=local_error(subject, target, together=True),
        suffix=suffix,
        deviation=deviated,
        distances=distances(subject.full, target),
    )
