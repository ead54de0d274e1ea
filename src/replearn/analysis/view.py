"""The printed view of an analysis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..planning.table import shown, text_table

if TYPE_CHECKING:
    from .results import Analysis, Bias, TargetAnalysis


def analysis_text(analysis: Analysis) -> str:
    """Tables: a line a target, all together, gradients, distances, the trade-off; then notes."""
    lines = [
        f"{shown(analysis.model)}: {len(analysis.targets)} targets ({shown(analysis.placement)}), measured on "
        f"{analysis.num_samples} held-out samples",
        "",
        *_errors(analysis),
        "",
        *_recoverability(analysis),
    ]
    if analysis.gradient is not None:
        lines += ["", *_gradient(analysis)]
    if analysis.tradeoff:
        lines += ["", *_tradeoff(analysis)]
    lines += ["", *(shown(f"note  {note}") for note in analysis.notes)]
    return "\n".join(lines)


def number(value: float) -> str:
    """Three digits that can be read."""
    return f"{value:.3g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def _errors(analysis: Analysis) -> list[str]:
    head = ("target", "epsilon", "removal", "unexplained", "Pi", "measured", "bound", "printed", "agree")
    rows = [_error_row(target) for target in analysis.targets]
    all_ = analysis.together
    values = (all_.measured, all_.bound, all_.printed)
    rows.append(("all together", "", "", "", "", *map(number, values), f"{all_.agreement:.1%}"))
    return ["Local errors and output deviation", *text_table(head, rows, right=range(1, len(head)))]


def _error_row(target: TargetAnalysis) -> tuple[str, ...]:
    local, made = target.alone, target.deviation
    values = (local.epsilon, local.removal, local.relative, target.suffix.factor)
    outputs = (made.measured, made.bound, made.printed)
    return (shown(target.name), *map(number, (*values, *outputs)), f"{made.agreement:.1%}")


def _recoverability(analysis: Analysis) -> list[str]:
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
    return [title, *text_table(head, rows, right=range(3, len(head)))]


def _gradient(analysis: Analysis) -> list[str]:
    found = analysis.gradient
    if found is None:
        return []
    head = ("shared parameters", "true", "bias", "relative", "cosine", "through the output")

    def row(label: str, bias: Bias) -> tuple[str, ...]:
        relative = bias.measured / bias.true if bias.true else 0.0
        values = (bias.true, bias.measured, relative, bias.cosine, bias.through_output)
        return (label, *map(number, values))

    rows = [
        row("all kept, stop-gradient", found.stopped),
        row("all kept, gradients flow", found.flowing),
        row("sources, stop-gradient", found.sources_stopped),
        row("sources, gradients flow", found.sources_flowing),
    ]
    return [
        f"Gradient bias, mean loss of a batch; labels: {found.labels}",
        *text_table(head, rows, right=range(1, len(head))),
        f"bound {number(found.bound)} (G {number(found.sensitivity)}; with the measured deviation "
        f"{number(found.measured_bound)}); loss {number(found.loss)} -> {number(found.loss_replaced)}",
    ]


def _tradeoff(analysis: Analysis) -> list[str]:
    scored = analysis.score is not None
    head = ["K", "targets", "parameters", "FLOPs", "C(K)", "deviation", "agree", "removal: deviation", "agree"]
    head += ["score", "removal: score"] if scored else []
    rows = []
    for point in analysis.tradeoff:
        row = [str(point.interval), str(point.targets)]
        row += [f"{value:.3f}" for value in (point.parameters, point.flops, point.cost_formula, point.relative)]
        row += [f"{point.agreement:.1%}", f"{point.removal_relative:.3f}", f"{point.removal_agreement:.1%}"]
        if point.score is not None and point.removal_score is not None:
            row += [f"{point.score:.4g}", f"{point.removal_score:.4g}"]
        rows.append(row)
    title = "The interval K: what is left, and the relative deviation of the output"
    if scored:
        title += f" (the full model scores {analysis.score:.4g})"
    return [title, *text_table(head, rows, right=range(len(head)))]
