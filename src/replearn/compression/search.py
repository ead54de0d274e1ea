"""Search for the student that meets the goal: fit candidate forms and measure the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor, nn

from ..errors import ReplearnError
from .batches import Data
from .block_costs import BlockCosts, eval_copy
from .choose import Choice, Chooser, Goal, check_names
from .fit import Fitted, Progress, fit_
from .forms import Form, merge_corrections_
from .measure import Metric, Price, agreement, costs, iter_outputs
from .recognise import Recognition

MARGIN = 0.005  # of the latency measured before fitting: a second fit costs more than a second measurement


@dataclass(frozen=True, eq=False)
class Trial:
    """One fitted student, with costs before and after, and its divergence on held-out samples."""

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
    """Fits forms to copies of the model until a measured copy meets the goal."""

    goal: Goal
    model: nn.Module
    found: Recognition
    data: Data
    teacher_outputs: Sequence[Tensor]
    block_costs: BlockCosts
    realign: bool
    rank: int
    metric: Metric | None
    progress: Progress | None

    def search(self, form: Form | None) -> tuple[Choice | None, Trial]:
        """The choice of blocks, and the trial with the least divergence among those that meet the goal."""
        goal, found = self.goal, self.found
        candidates = found.candidates
        check_names(goal.names, found)
        if not candidates:
            first = found.blocks[0]
            raise ReplearnError(
                f"None of the {len(found.blocks)} blocks of {found.model} can go: {first.name} stays because "
                f"{first.kept}. print(replearn.compression.recognise(model, loader)) says why of each."
            )
        if goal.quantity == "blocks" and goal.at_most > len(candidates):
            raise ReplearnError(
                f"budget='blocks={goal.at_most:.0f}': {found.model} has {len(found.blocks)} blocks, of which "
                f"{len(candidates)} can go; ask for blocks={len(candidates)} or fewer."
            )
        best_forms = self.block_costs.accurate_forms() if form is None else dict.fromkeys(candidates, form)
        if goal.names:
            return None, self.fit({n: "removal" if n in goal.removal else best_forms[n] for n in goal.names})
        chooser = Chooser(
            self.model, found, self.data, self.block_costs, goal.quantity, self.metric, self.progress
        )
        if goal.quantity == "blocks":
            names = chooser.names(int(goal.at_most))
            return chooser.choice, self.fit({name: best_forms[name] for name in names})
        tried: list[dict[str, Form]] = [{name: best_forms[name] for name in candidates}]
        if form is None:
            tried.insert(0, dict.fromkeys(candidates, "removal"))
        shares = [self.remaining_share(forms) for forms in tried]
        if min(shares) > goal.at_most:
            raise self.unmet_error(min(shares))
        feasible = [forms for forms, share in zip(tried, shares, strict=True) if share <= goal.at_most]
        trials = [self.fit_within_goal(forms, chooser) for forms in feasible]
        met = [trial for trial in trials if trial.share(goal.quantity) <= goal.at_most]
        if not met:
            raise self.unmet_error(min(trial.share(goal.quantity) for trial in trials))
        return chooser.choice, min(met, key=lambda trial: trial.divergence)

    def unmet_error(self, share: float) -> ReplearnError:
        name, quantity = self.found.model, self.goal.quantity
        return ReplearnError(
            f"{name} can't meet {quantity}<={self.goal.at_most:.0%}: with all {len(self.found.candidates)} blocks "
            f"out that can go, {share:.0%} is left. Ask for {quantity}<={share + 0.005:.0%} or more."
        )

    def remaining_share(self, forms: Mapping[str, Form]) -> float:
        """The share of the quantity that is left with these forms, before fitting; latency is measured."""
        if self.goal.quantity != "latency":
            return self.predicted_share(forms)
        before, after = self.measure(self.block_costs.unfitted_model(forms))
        return after.latency / before.latency

    def predicted_share(self, forms: Mapping[str, Form]) -> float:
        after, before = self.block_costs.predict(forms), self.block_costs.model_cost
        return after.of(self.goal.quantity) / max(before.of(self.goal.quantity), 1e-30)

    def fit_within_goal(self, forms: Mapping[str, Form], chooser: Chooser) -> Trial:
        """Fit with the fewest blocks removed that meet the goal, in the chooser's order; else with all."""
        goal, total = self.goal, len(self.found.candidates)

        def first_forms(number: int) -> dict[str, Form]:
            return {name: forms[name] for name in chooser.names(number)}

        number = next((n for n in range(1, total) if self.predicted_share(first_forms(n)) <= goal.at_most), total)
        if goal.quantity == "latency":
            number = fewest_blocks(number, total, goal.at_most, lambda n: self.remaining_share(first_forms(n)))
        while True:
            trial = self.fit(first_forms(number))
            if trial.share(goal.quantity) > goal.at_most:  # noise, or truly slower
                before, after = self.measure(trial.student)
                remeasured = replace(trial, before=before, after=after)
                trial = min(trial, remeasured, key=lambda t: t.share(goal.quantity))
            if trial.share(goal.quantity) <= goal.at_most or number >= total:
                return trial
            number += 1

    def fit(self, forms: dict[str, Form]) -> Trial:
        student = eval_copy(self.model)
        fitted = fit_(
            student, self.model, forms, self.data, self.found.order.blocks,
            realign=self.realign, rank=self.rank, progress=self.progress,
        )  # fmt: skip
        outputs = iter_outputs(student, self.data, self.data.held_out())
        divergence = agreement(self.teacher_outputs, outputs).divergence
        return Trial(forms, student, fitted, divergence, *self.measure(student))

    def measure(self, student: nn.Module) -> tuple[Price, Price]:
        """The costs of the model and of the student with merged corrections, timed in turns."""
        before, after = costs([self.model, merge_corrections_(eval_copy(student, share=True))], self.data)
        return before, after


def fewest_blocks(number: int, total: int, share: float, measure: Callable[[int], float]) -> int:
    """The least number of removed blocks whose measured share is below `share`, from a first guess."""
    measured = cache(measure)
    limit = share - MARGIN
    while number < total and measured(number) > limit:
        needed = math.ceil(number * (1 - share) / max(1 - measured(number), 1e-3))
        number = min(total, max(number + 1, min(needed, 2 * number)))
    while number > 1 and measured(number - 1) <= limit:
        number -= 1
    return number
