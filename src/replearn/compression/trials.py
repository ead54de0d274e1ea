"""Fit the forms that are tried, and take as many blocks out as the goal asks for, by what is measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor, nn

from ..errors import ReplearnError
from .batches import Data
from .choose import Choice, Chooser, Goal, check_names
from .corrections import Form, plain_
from .fit import Fitted, Progress, fit_
from .measure import Metric, Price, agreement, answers, costs
from .prices import Prices, eval_copy
from .recognise import Recognition

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
class Search:
    """Fits forms to copies of the model and measures the copies, until one meets the goal."""

    goal: Goal
    model: nn.Module
    found: Recognition
    data: Data
    taught: Sequence[Tensor]
    prices: Prices
    realign: bool
    rank: int
    metric: Metric | None
    progress: Progress | None

    def best(self, form: Form | None) -> tuple[Choice | None, Trial]:
        """The student to hand out; without a `form`, the one that keeps most on held-out samples at the goal."""
        goal, found = self.goal, self.found
        every = found.candidates
        check_names(goal.names, found)
        if not every:
            first = found.blocks[0]
            raise ReplearnError(
                f"None of the {len(found.blocks)} blocks of {found.model} can go: {first.name} stays because "
                f"{first.kept}. print(replearn.compression.recognise(model, loader)) says why of each."
            )
        if goal.quantity == "blocks" and goal.at_most > len(every):
            raise ReplearnError(
                f"budget='blocks={goal.at_most:.0f}': {found.model} has {len(found.blocks)} blocks, of which "
                f"{len(every)} can go; ask for blocks={len(every)} or fewer."
            )
        rich = self.prices.richest() if form is None else dict.fromkeys(every, form)
        if goal.names:
            return None, self.fit({n: "removal" if n in goal.removal else rich[n] for n in goal.names})
        chooser = Chooser(self.model, found, self.data, self.prices, goal.quantity, self.metric, self.progress)
        if goal.quantity == "blocks":
            names = chooser.names(int(goal.at_most))
            return chooser.choice, self.fit({name: rich[name] for name in names})
        tried: list[dict[str, Form]] = [{name: rich[name] for name in every}]
        if form is None:
            tried.insert(0, dict.fromkeys(every, "removal"))
        shares = [self.share_of(forms) for forms in tried]
        if min(shares) > goal.at_most:
            raise self.unmet(min(shares))
        able = [forms for forms, share in zip(tried, shares, strict=True) if share <= goal.at_most]
        trials = [self.meeting(forms, chooser) for forms in able]
        met = [trial for trial in trials if trial.share(goal.quantity) <= goal.at_most]
        if not met:
            raise self.unmet(min(trial.share(goal.quantity) for trial in trials))
        return chooser.choice, min(met, key=lambda trial: trial.divergence)

    def unmet(self, share: float) -> ReplearnError:
        name, quantity = self.found.model, self.goal.quantity
        return ReplearnError(
            f"{name} can't meet {quantity}<={self.goal.at_most:.0%}: with all {len(self.found.candidates)} blocks "
            f"out that can go, {share:.0%} is left. Ask for {quantity}<={share + 0.005:.0%} or more."
        )

    def share_of(self, forms: Mapping[str, Form]) -> float:
        """What is left of the quantity with these forms, before they are fitted; latency is measured."""
        if self.goal.quantity != "latency":
            return self.promised(forms)
        before, after = self.measure(self.prices.unfitted(forms))
        return after.latency / before.latency

    def promised(self, forms: Mapping[str, Form]) -> float:
        quantity = self.goal.quantity
        return self.prices.after(forms).of(quantity) / max(self.prices.now.of(quantity), 1e-30)

    def meeting(self, forms: Mapping[str, Form], chooser: Chooser) -> Trial:
        """Fit with as few blocks out, in the order of choice, as measure up to the goal; with all if none do."""
        goal, total = self.goal, len(self.found.candidates)

        def first(number: int) -> dict[str, Form]:
            return {name: forms[name] for name in chooser.names(number)}

        number = next((n for n in range(1, total) if self.promised(first(n)) <= goal.at_most), total)
        if goal.quantity == "latency":
            number = measured_number(number, total, goal.at_most, lambda n: self.share_of(first(n)))
        while True:
            trial = self.fit(first(number))
            if trial.share(goal.quantity) > goal.at_most:  # a busy moment, or truly slower
                before, after = self.measure(trial.student)
                again = replace(trial, before=before, after=after)
                trial = min(trial, again, key=lambda t: t.share(goal.quantity))
            if trial.share(goal.quantity) <= goal.at_most or number >= total:
                return trial
            number += 1

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
