"""The printed view of an analysis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..planning.table import shown, text_table

if TYPE_CHECKING:
    from .results import Analysis, Convergence, Deviation, GradientBias


def analysis_text(analysis: Analysis) -> str:
    """Tables: a line a target, all together, distances, gradients, convergence; then notes."""
    parts = [
        f"{shown(analysis.model)}: {len(analysis.targets)} targets ({shown(analysis.placement)}), measured on "
        f"{analysis.num_samples} held-out samples",
        _errors(analysis),
        _recoverability(analysis),
        _gradient(analysis.gradient) if analysis.gradient else "",
        _convergence(analysis.convergence) if analysis.convergence else "",
        "\n".join(shown(f"note  {note}") for note in analysis.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def number(value: float) -> str:
    """Three digits that can be read."""
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def percent(value: float) -> str:
    return f"{value:.1%}"


def _table(title: str, head: str, rows: Iterable[Sequence[str | float]], left: int = 1) -> str:
    """A table under its title; `head` has the columns' names with bars between, `left` says how many are words."""
    cells = [[shown(cell) if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
    columns = head.split(" | ")
    return "\n".join([title, *text_table(columns, cells, right=range(left, len(columns)))])


def _errors(analysis: Analysis) -> str:
    def outputs(made: Deviation) -> tuple[str | float, ...]:
        return made.measured, made.bound, made.printed, percent(made.agreement)

    rows: list[tuple[str | float, ...]] = [
        (t.name, t.alone.epsilon, t.alone.removal, t.alone.relative, t.suffix.factor, *outputs(t.deviation))
        for t in analysis.targets
    ]
    rows.append(("all together", "", "", "", "", *outputs(analysis.together)))
    head = "target | epsilon | removal | unexplained | Pi | measured | bound | printed | agree"
    return _table("Local errors and output deviation", head, rows)


def _recoverability(analysis: Analysis) -> str:
    rows = [
        (
            *(target.name, found.role, found.span, found.whole, found.rows, found.best_row),
            f"{number(min(found.heads))}-{number(max(found.heads))}" if found.heads else "",
            found.chance,
        )
        for target in analysis.targets
        for found in target.distances
    ]
    title = "Recoverability: what the neighbours' span leaves of a removed weight (0 all recovered, 1 nothing)"
    return _table(title, "target | weight | span | whole | per row | best row | per head | chance", rows, left=3)


def _gradient(found: GradientBias) -> str:
    rows = [
        (label, bias.true, bias.measured, bias.measured / (bias.true or 1), bias.cosine, bias.through_output)
        for label, bias in found.rows().items()
    ]
    head = "shared parameters | true | bias | relative | cosine | through the output"
    return _table(f"Gradient bias, mean loss of a batch; labels: {found.labels}", head, rows) + (
        f"\nbound {number(found.bound)} (G {number(found.sensitivity)}; with the measured deviation "
        f"{number(found.measured_bound)}); loss {number(found.loss)} -> {number(found.loss_replaced)}"
    )


def _convergence(found: Convergence) -> str:
    rows = [
        (
            *(str(point.step), point.loss, point.squared_gradient, *found.bound(place)),
            *(found.lr * point.smoothness, point.stop_gradient_bias, point.full_squared, point.bias_squared),
        )
        for place, point in enumerate(found.points)
    ]
    head = "step | J | |grad J|^2 | mean so far | start term | noise term | eta L | stop-gradient"
    title = f"Convergence of plain SGD from the start (eta {found.lr:g}, {found.num_steps} steps)"
    table = _table(title, f"{head} | |grad_s l|^2 | |bias|^2", rows, left=0)
    return "\n".join([table, *found.verdicts()])
