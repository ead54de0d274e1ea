"""A choice of targets with its reasons, as data and as text."""

from __future__ import annotations

from dataclasses import dataclass

from ..costs.budgets import Budget
from ..costs.data import Cost, Promise
from ..planning.data import Plan
from ..planning.table import shown, text_table


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


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0%"
