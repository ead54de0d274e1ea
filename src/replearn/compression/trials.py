"""Fit the forms that are tried, and take as many blocks out as the goal asks for, by what is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn

from ..errors import ReplearnError
from .batches import Data
from .choose import Choice, Chooser, Goal, check_names
from .corrections import Form, plain_
from .fit import Fitted, fit_
from .measure import Metric, Price, agreement, answers, costs
from .prices import Prices, eval_copy
from .recognise import Recognition

Progress = Callable[[str], None]
MARGIN = 0.005  # by which an unfitted model is below the latency asked for: a fit is dearer than a measurement


@dataclass(frozen=True, eq=False)
class Trial:
    """One fitted student, what it and the untouched model cost, and its divergence on held-out samples."""

    forms: dict[str, Form]
    student: nn.Module
    fitted: Fitted
    divergence: float
    before: Price
    after: Price

    def share(self, quantity: str) -> float:
        return self.after.of(quantity) / max(self.before.of(quantity), 1e-30)


@dataclass(frozen=True, eq=False)
class Fitter:
    """Fits forms to a copy of the model and measures the copy."""

    model: nn.Module
    found: Recognition
    data: Data
    taught: Sequence[Tensor]
    realign: bool
    rank: int
    progress: Progress | None

    def fit(self, forms: dict[str, Form]) -> Trial:
        student = eval_copy(self.model)
        fitted = fit_(
            student, self.model, forms, self.data, self.found.way.blocks,
            realign=self.realign, rank=self.rank, progress=self.progress,
        )  # fmt: skip
        gap = agreement(self.taught, answers(student, self.data, self.data.held())).divergence
        before, after = self.measure(student)
        return Trial(forms, student, fitted, gap, before, after)

    def measure(self, student: nn.Module) -> tuple[Price, Price]:
        """The cost of the untouched model and of the student, timed in turns, as it will be handed out."""
        before, after = costs([self.model, plain_(eval_copy(student, share=True))], self.data)
        return before, after


def best_trial(
    fitter: Fitter, goal: Goal, form: Form | None, prices: Prices, metric: Metric | None
) -> tuple[Choice | None, Trial]:
    """The student to hand out; without a `form`, the one that keeps most on held-out samples at the goal."""
    found, rich = fitter.found, prices.richest()
    if goal.names:
        check_names(goal.names, found)
        return None, fitter.fit(
            {name: "removal" if name in goal.removal else form or rich[name] for name in goal.names}
        )
    if goal.quantity == "blocks" and goal.blocks > len(found.candidates):
        raise ReplearnError(
            f"budget='blocks={goal.blocks}': {found.model} has {len(found.blocks)} blocks, of which "
            f"{len(found.candidates)} can go; ask for blocks={len(found.candidates)} or fewer."
        )
    tried: list[dict[str, Form]] = (
        [dict.fromkeys(found.candidates, "removal"), dict(rich)]
        if form is None
        else [dict.fromkeys(found.candidates, form)]
    )
    if goal.quantity != "blocks":
        tried = able(fitter, goal, tried, prices)
    chooser = Chooser(fitter.model, found, fitter.data, prices, goal.quantity, metric, fitter.progress)
    if goal.quantity == "blocks":
        names = chooser.names(goal.blocks)
        return chooser.choice, fitter.fit({name: form or rich[name] for name in names})
    trials = [meeting(fitter, goal, forms, chooser, prices) for forms in tried]
    met = [trial for trial in trials if trial.share(goal.quantity) <= goal.share]
    if not met:
        raise unmet(found, goal, min(trial.share(goal.quantity) for trial in trials), len(found.candidates))
    return chooser.choice, min(met, key=lambda trial: trial.divergence)


def able(fitter: Fitter, goal: Goal, tried: list[dict[str, Form]], prices: Prices) -> list[dict[str, Form]]:
    """Those of the forms that meet the goal with every block out; ReplearnError where none does."""
    shares = [share_of(fitter, goal, {n: forms[n] for n in fitter.found.candidates}, prices) for forms in tried]
    if min(shares) > goal.share:
        raise unmet(fitter.found, goal, min(shares), len(fitter.found.candidates))
    return [forms for forms, share in zip(tried, shares, strict=True) if share <= goal.share]


def share_of(fitter: Fitter, goal: Goal, forms: Mapping[str, Form], prices: Prices) -> float:
    """What is left of the quantity with these forms, before they are fitted; latency is measured."""
    if goal.quantity != "latency":
        return prices.after(forms).of(goal.quantity) / max(prices.now.of(goal.quantity), 1e-30)
    before, after = fitter.measure(prices.unfitted(forms))
    return after.latency / before.latency


def unmet(found: Recognition, goal: Goal, share: float, number: int) -> ReplearnError:
    return ReplearnError(
        f"{found.model} can't meet {goal.quantity}<={goal.share:.0%}: with all {number} blocks out that can go, "
        f"{share:.0%} is left. Ask for {goal.quantity}<={share + 0.005:.0%} or more."
    )


def meeting(fitter: Fitter, goal: Goal, forms: Mapping[str, Form], chooser: Chooser, prices: Prices) -> Trial:
    """Fit with as few blocks out, in the order of choice, as measure up to the goal; with all out if none do."""
    total = len(fitter.found.candidates)

    def first(number: int) -> dict[str, Form]:
        return {name: forms[name] for name in chooser.names(number)}

    number = 1
    while number < total and prices.after(first(number)).of(goal.quantity) > goal.share * prices.now.of(
        goal.quantity
    ):
        number += 1
    if goal.quantity == "latency":
        number = measured_number(number, total, goal.share, lambda n: share_of(fitter, goal, first(n), prices))
    while True:
        trial = fitter.fit(first(number))
        if trial.share(goal.quantity) > goal.share:  # a busy moment, or truly slower
            before, after = fitter.measure(trial.student)
            again = Trial(trial.forms, trial.student, trial.fitted, trial.divergence, before, after)
            trial = min(trial, again, key=lambda t: t.share(goal.quantity))
        if trial.share(goal.quantity) <= goal.share or number >= total:
            return trial
        number += 1


def measured_number(number: int, total: int, share: float, measured: Callable[[int], float]) -> int:
    """The least number of blocks whose measured share is below the one asked for, from a first guess."""
    left = cache(measured)
    wanted = share - MARGIN
    while number < total and left(number) > wanted:
        needed = math.ceil(number * (1 - share) / max(1 - left(number), 1e-3))
        number = min(total, max(number + 1, min(needed, 2 * number)))
    while number > 1 and left(number - 1) <= wanted:
        number -= 1
    return number
