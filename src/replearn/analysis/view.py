"""The printed view of an analysis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..planning.table import shown, text_table

if TYPE_CHECKING:
    from .results import Analysis, Convergence, GradientBias, Quality


def analysis_text(analysis: Analysis) -> str:
    """Tables: a line a target, all together, gradients, distances, the trade-off, convergence; then notes."""
    parts = [
        f"{shown(analysis.model)}: {len(analysis.targets)} targets ({shown(analysis.placement)}), measured on "
        f"{analysis.num_samples} held-out samples",
        _errors(analysis),
        _recoverability(analysis),
        _gradient(analysis.gradient) if analysis.gradient else "",
        _tradeoff(analysis) if analysis.tradeoff else "",
        _convergence(analysis.convergence) if analysis.convergence else "",
        "\n".join(shown(f"note  {note}") for note in analysis.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def number(value: float) -> str:
    """Three digits that can be read."""
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    return "\n".join([title, *text_table(head, rows, right=range(left, len(head)))])


def _errors(analysis: Analysis) -> str:
    head = ("target", "epsilon", "removal", "unexplained", "Pi", "measured", "bound", "printed", "agree")
    rows = []
    for target in analysis.targets:
        local, made = target.alone, target.deviation
        values = (local.epsilon, local.removal, local.relative, target.suffix.factor)
        outputs = (made.measured, made.bound, made.printed)
        rows.append((shown(target.name), *map(number, (*values, *outputs)), f"{made.agreement:.1%}"))
    all_ = analysis.together
    outputs = (all_.measured, all_.bound, all_.printed)
    rows.append(("all together", "", "", "", "", *map(number, outputs), f"{all_.agreement:.1%}"))
    return _table("Local errors and output deviation", head, rows)


def _recoverability(analysis: Analysis) -> str:
    head = ("target", "weight", "span", "whole", "per row", "best row", "per head", "chance")
    rows = [
        (
            shown(target.name),
            found.role,
            found.span,
            *(f"{value:.3f}" for value in (found.whole, found.rows, found.best_row)),
            f"{min(found.heads):.3f}-{max(found.heads):.3f}" if found.heads else "",
            f"{found.chance:.3f}",
        )
        for target in analysis.targets
        for found in target.distances
    ]
    title = "Recoverability: what the neighbours' span leaves of a removed weight (0 all recovered, 1 nothing)"
    return _table(title, head, rows, left=3)


def _gradient(found: GradientBias) -> str:
    head = ("shared parameters", "true", "bias", "relative", "cosine", "through the output")
    rows = []
    for label, bias in found.rows().items():
        values = (bias.true, bias.measured, bias.measured / (bias.true or 1), bias.cosine, bias.through_output)
        rows.append((label, *map(number, values)))
    return _table(f"Gradient bias, mean loss of a batch; labels: {found.labels}", head, rows) + (
        f"\nbound {number(found.bound)} (G {number(found.sensitivity)}; with the measured deviation "
        f"{number(found.measured_bound)}); loss {number(found.loss)} -> {number(found.loss_replaced)}"
    )


def _tradeoff(analysis: Analysis) -> str:
    scored = analysis.score is not None
    head = ["K", "targets", "parameters", "FLOPs", "C(K)", "deviation", "agree", *["score"] * scored]
    head += ["removal: deviation", "agree", *["score"] * scored]

    def kept(found: Quality) -> list[str]:
        score = [f"{found.score:.4g}"] if found.score is not None else []
        return [f"{found.relative:.3f}", f"{found.agreement:.1%}", *score]

    rows = []
    for point in analysis.tradeoff:
        saved = (point.parameters, point.flops, point.cost_formula)
        row = [str(point.interval), str(point.targets), *(f"{value:.3f}" for value in saved)]
        rows.append([*row, *kept(point.operators), *kept(point.removal)])
    title = "The interval K: what is left, and the relative deviation of the output"
    title += f" (the full model scores {analysis.score:.4g})" if scored else ""
    return _table(title, head, rows, left=0)


def _convergence(found: Convergence) -> str:
    head = ("step", "J", "|grad J|^2", "mean so far", "start term", "noise term", "eta L", "stop-gradient")
    ends = ("|grad_s l|^2", "|bias|^2")
    rows = []
    for place, point in enumerate(found.points):
        mean, start, noise = found.bound(place)
        values = (point.loss, point.squared_gradient, mean, start, noise, found.lr * point.smoothness)
        rest = (point.stop_gradient_bias, point.full_squared, point.bias_squared)
        rows.append((str(point.step), *map(number, (*values, *rest))))
    title = f"Convergence of plain SGD from the start (eta {found.lr:g}, {found.num_steps} steps)"
    return "\n".join([_table(title, (*head, *ends), rows, left=0), *found.verdicts()])
