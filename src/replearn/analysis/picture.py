"""Pictures of an analysis: errors and bounds, recoverability, the trade-off of K. PNG or SVG by the name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ReplearnError
from .results import Analysis

GREY, BLUE, ORANGE, GREEN, PALE = "#6b7280", "#1f5fa8", "#c2570c", "#15803d", "#d5d9e0"


def draw(analysis: Analysis, path: str | Path) -> Path:
    """Draw all of it as one figure; ReplearnError where matplotlib is missing or the file can't be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReplearnError("A picture needs matplotlib: pip install 'replearn[report]'.") from error
    panels: list[Callable[[Any, Analysis], None]] = [_local, _outputs, _recoverability]
    if analysis.gradient is not None:
        panels.append(_gradient)
    if analysis.tradeoff:
        panels += [_savings, _damage]
    columns = 3 if len(panels) > 4 else 2
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.9 * columns, 3.7 * rows), dpi=140, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, place in zip(panels, axes, strict=False):
        panel(place, analysis)
        _plain_frame(place)
    for place in axes[len(panels) :]:
        place.set_axis_off()
    title = f"{analysis.model}, {analysis.placement}: {analysis.num_samples} held-out samples"
    figure.suptitle(title, fontsize=11)
    path = Path(path)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ReplearnError(f"Can't write the picture {path}: {error}.") from error
    return path


def _local(axes: Any, analysis: Analysis) -> None:
    """epsilon_r of every target, and that of removing it."""
    targets = analysis.targets
    places = range(len(targets))
    axes.bar([p - 0.2 for p in places], [t.alone.removal for t in targets], 0.4, color=PALE, label="removal")
    axes.bar([p + 0.2 for p in places], [t.alone.epsilon for t in targets], 0.4, color=ORANGE, label="operator")
    axes.plot(
        [p + 0.2 for p in places],
        [t.together.epsilon for t in targets],
        "_",
        color="black",
        ms=14,
        label="behind earlier replacements",
    )
    axes.set_title("Local error: max |g(h) - f(h)| / max(|h|, 1)", fontsize=9.5)
    axes.set_ylim(0, 1.3 * max(max(t.alone.removal, t.alone.epsilon, t.together.epsilon) for t in targets))
    _names(axes, analysis)
    axes.legend(fontsize=7.5, frameon=False, ncols=3, loc="upper center")


def _outputs(axes: Any, analysis: Analysis) -> None:
    """The measured deviation of the output, and the bounds on it, on a logarithmic scale."""
    made = [target.deviation for target in analysis.targets] + [analysis.together]
    marks: list[tuple[str, str, str, list[float]]] = [
        ("bound, printed (product of factors)", "^", GREY, [d.printed for d in made]),
        ("bound (suffix factor)", "D", BLUE, [d.bound for d in made]),
        ("bound with |g - f| itself", "_", BLUE, [d.sharp for d in made]),
        ("measured, largest", "o", ORANGE, [d.measured for d in made]),
        ("measured, mean", ".", ORANGE, [d.mean for d in made]),
    ]
    for label, mark, tint, values in marks:
        points = [(place, value) for place, value in enumerate(values) if value > 0]
        if points:
            axes.plot(*zip(*points, strict=True), mark, color=tint, label=label, ms=12 if mark == "_" else 6)
    if len(made) > 2:
        axes.axvline(len(made) - 1.5, color=PALE, lw=1)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.65)
    axes.set_title("Output deviation |F_RepL(x) - F(x)|", fontsize=9.5)
    _names(axes, analysis, "all")
    axes.legend(fontsize=7, frameon=False, loc="upper left", ncols=1)


def _recoverability(axes: Any, analysis: Analysis) -> None:
    """What the neighbours' span leaves of each removed weight; the grey tick is chance."""
    labels = list(dict.fromkeys((d.role, d.span) for t in analysis.targets for d in t.distances))
    for y, (role, span) in enumerate(labels):
        found = [d for t in analysis.targets for d in t.distances if (d.role, d.span) == (role, span)]
        axes.plot([d.whole for d in found], [y - 0.18] * len(found), "o", color=BLUE, ms=4, alpha=0.7)
        axes.plot([d.rows for d in found], [y + 0.02] * len(found), "s", color=ORANGE, ms=4, alpha=0.7)
        heads = [value for d in found for value in d.heads]
        axes.plot(heads, [y + 0.2] * len(heads), ".", color=GREEN, ms=4, alpha=0.6)
        axes.plot([d.chance for d in found], [y + 0.02] * len(found), "|", color=GREY, ms=16, mew=1.2)
    names = [f"{role}\n{span.replace('previous', 'prev')}" for role, span in labels]
    axes.set_yticks(range(len(labels)), names, fontsize=6.5)
    axes.set_ylim(len(labels) - 0.4, -0.9)
    values = [v for t in analysis.targets for d in t.distances for v in (d.whole, d.rows, d.chance, *d.heads)]
    axes.set_xlim(min([0.97, *values]) - 0.01, 1.003)
    headed = any(d.heads for t in analysis.targets for d in t.distances)
    kinds = [("o", BLUE, "whole"), ("s", ORANGE, "per row"), (".", GREEN, "per head")]
    for mark, tint, label in kinds if headed else kinds[:2]:
        axes.plot([], [], mark, color=tint, ms=4, label=label)
    axes.plot([], [], "|", color=GREY, ms=8, label="chance")
    axes.legend(fontsize=7, frameon=False, ncols=4, loc="upper center")
    axes.set_title("Distance of removed weights to the neighbours' span", fontsize=9.5)


def _gradient(axes: Any, analysis: Analysis) -> None:
    """The gradient's bias on shared parameters, relative to the true gradient."""
    found = analysis.gradient
    if found is None:
        return
    rows = [
        ("all kept,\nstop-gradient", found.stopped),
        ("all kept,\nflowing", found.flowing),
        ("sources,\nstop-gradient", found.sources_stopped),
        ("sources,\nflowing", found.sources_flowing),
    ]
    for place, (_, bias) in enumerate(rows):
        size = bias.true or 1.0
        axes.bar(place, bias.measured / size, 0.55, color=ORANGE, label="measured" if place == 0 else None)
        axes.plot(
            place,
            bias.through_output / size,
            "_",
            color="black",
            ms=22,
            label="through the output" if place == 0 else None,
        )
    top = max(max(bias.measured, bias.through_output) / (bias.true or 1.0) for _, bias in rows)
    axes.set_ylim(0, 1.45 * top or 1)
    # below the axis, not in the bar, which may be narrower or lower than the words
    labels = [f"{label}\ncosine {bias.cosine:.2f}" for label, bias in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=7.5)
    axes.set_title("Gradient bias |grad J - grad l| / |grad l|", fontsize=9.5)
    size = found.stopped.true or 1.0
    axes.text(
        0.5,
        0.97,
        f"bound {found.bound / size:.3g}; from the measured deviation {found.measured_bound / size:.3g}",
        transform=axes.transAxes,
        ha="center",
        va="top",
        fontsize=7.5,
        color=BLUE,
    )
    axes.legend(fontsize=7, frameon=False, loc="upper center", ncols=2, bbox_to_anchor=(0.5, 0.93))


def _savings(axes: Any, analysis: Analysis) -> None:
    points = analysis.tradeoff
    ks = [point.interval for point in points]
    axes.plot(ks, [point.parameters for point in points], "o-", color=BLUE, label="parameters")
    axes.plot(ks, [point.flops for point in points], "s-", color=GREEN, label="FLOPs")
    axes.plot(ks, [point.cost_formula for point in points], ":", color=GREY, label="C(K), the paper's formula")
    axes.set_xticks(ks)
    axes.set_xlabel("interval K", fontsize=8.5)
    axes.set_title("What is left of the full model", fontsize=9.5)
    axes.legend(fontsize=7.5, frameon=False)


def _damage(axes: Any, analysis: Analysis) -> None:
    """What each interval costs before any training: the score if there is one, else equal predictions."""
    points = analysis.tradeoff
    ks = [point.interval for point in points]
    scored = analysis.score is not None and all(point.score is not None for point in points)
    own = [point.score if scored else 100 * point.agreement for point in points]
    floor = [point.removal_score if scored else 100 * point.removal_agreement for point in points]
    axes.plot(ks, own, "o-", color=ORANGE, label="operators, no training")
    axes.plot(ks, floor, "o-", color=GREY, label="removal")
    axes.axhline(analysis.score if scored else 100, color=GREY, lw=0.8, ls=":", label="full model")
    for k, value, point in zip(ks, own, points, strict=True):
        axes.annotate(
            f"{point.targets} targets", (k, value), (0, 6), textcoords="offset points", ha="center", fontsize=6.5
        )
    axes.set_xticks(ks)
    axes.margins(y=0.12)
    axes.set_xlabel("interval K", fontsize=8.5)
    axes.set_title("Score" if scored else "Predictions equal to the full model's, %", fontsize=9.5)
    axes.legend(fontsize=7.5, frameon=False)


def _names(axes: Any, analysis: Analysis, *more: str) -> None:
    names = [target.name for target in analysis.targets] + list(more)
    many = len(names) > 5 or max(map(len, names)) > 10
    style = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if many else {}
    axes.set_xticks(range(len(names)), names, fontsize=7.5 if len(names) < 14 else 6, **style)


def _plain_frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="both", labelsize=7.5)
    axes.grid(axis="y", color=PALE, lw=0.5, zorder=0)
    axes.set_axisbelow(True)
