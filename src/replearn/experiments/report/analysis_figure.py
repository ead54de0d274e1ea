"""An analysis as a picture: errors and bounds, recoverability, gradients, convergence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...analysis import Analysis
from .matplotlib_figure import new_figure, save
from .svg import PALETTE


@dataclass(frozen=True)
class Series:
    """Values by place on the horizontal axis, several at one place or none; a line joins single ones."""

    label: str
    role: str
    values: Sequence[Sequence[float]]
    joined: bool = False
    hollow: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    places: Sequence[str]
    series: Sequence[Series]
    log: bool = False


def write_analysis(analysis: Analysis, path: Path) -> Path:
    """Draw the picture, as SVG or as the file's name says."""
    panels = panels_of(analysis)
    columns = 3 if len(panels) > 4 else 2
    rows = -(-len(panels) // columns)
    figure = new_figure(4.4 * columns, 3.6 * rows)
    figure.suptitle(f"{analysis.model}, {analysis.placement}: {analysis.num_samples} held-out samples")
    for number, panel in enumerate(panels, start=1):
        draw_panel(figure.add_subplot(rows, columns, number), panel)
    return save(figure, path)


def panels_of(analysis: Analysis) -> list[Panel]:
    targets = analysis.targets
    names = [target.name for target in targets]
    made = [*(target.deviation for target in targets), analysis.together]
    spans = list(dict.fromkeys((d.role, d.span) for t in targets for d in t.distances))
    held = [[d for t in targets for d in t.distances if (d.role, d.span) == span] for span in spans]
    panels = [
        Panel("Local error: max |g(h) - f(h)| / max(|h|, 1)", names, [
            Series("removal", "removal", [[t.alone.removal] for t in targets], hollow=True),
            Series("operator", "repl", [[t.alone.epsilon] for t in targets]),
            Series("behind the ones before", "ink", [[t.together.epsilon] for t in targets], hollow=True),
        ]),
        Panel("Output deviation |F_RepL(x) - F(x)|, and its bounds", [*names, "all"], [
            Series("bound as printed", "muted", [[d.printed] for d in made], hollow=True),
            Series("bound", "series0", [[d.bound] for d in made], hollow=True),
            Series("measured: largest", "repl", [[d.measured] for d in made]),
            Series("mean", "series5", [[d.mean] for d in made]),
        ], log=True),
        Panel("Distance of removed weights to the neighbours' span", [f"{r} {s}" for r, s in spans], [
            Series("whole", "series0", [[d.whole for d in group] for group in held]),
            Series("per row", "repl", [[d.rows for d in group] for group in held]),
            Series("per head", "series1", [[h for d in group for h in d.heads] for group in held]),
            Series("chance", "muted", [[d.chance for d in group] for group in held], hollow=True),
        ]),
    ]  # fmt: skip
    if analysis.gradient is not None:
        rows = analysis.gradient.rows()
        panels.append(Panel("Gradient bias |grad J - grad l| / |grad l|", list(rows), [
            Series("measured", "repl", [[bias.measured / (bias.true or 1)] for bias in rows.values()]),
            Series("through the output", "ink", [[b.through_output / (b.true or 1)] for b in rows.values()],
                   hollow=True),
        ]))  # fmt: skip
    if found := analysis.convergence:
        steps = [str(point.step) for point in found.points]
        bounds = [found.bound(number) for number in range(len(steps))]
        panels.append(Panel("Training by plain SGD: |grad J|^2 and its bound", steps, [
            Series("mean |grad J|^2", "repl", [[mean] for mean, _, _ in bounds], joined=True),
            Series("start term", "series0", [[start] for _, start, _ in bounds], joined=True),
            Series("noise term", "series1", [[noise] for _, _, noise in bounds], joined=True),
            Series("J", "muted", [[point.loss] for point in found.points], joined=True, hollow=True),
        ], log=True))  # fmt: skip
        panels.append(Panel("Training by plain SGD: the full network's gradient", steps, [
            Series("|grad_s J|^2", "repl", [[point.shared_squared] for point in found.points], joined=True),
            Series("|grad_s l|^2", "series0", [[point.full_squared] for point in found.points], joined=True),
            Series("|bias|^2", "series6", [[point.bias_squared] for point in found.points], joined=True),
        ], log=True))  # fmt: skip
    return panels


def draw_panel(axes: Any, panel: Panel) -> None:
    for number, series in enumerate(panel.series):
        points = [(place, v) for place, group in enumerate(series.values) for v in group if v > 0 or not panel.log]
        if not points:
            continue
        shift = 0.0 if series.joined else 0.12 * (number - (len(panel.series) - 1) / 2)
        colour = PALETTE[series.role][0]
        style = {"marker": "o", "ms": 4, "color": colour, "mfc": "none" if series.hollow else colour}
        line = ("--" if series.hollow else "-") if series.joined else ""
        places, values = zip(*points, strict=True)
        axes.plot([place + shift for place in places], values, linestyle=line, label=series.label, **style)
    many = len(panel.places) > 12  # numbers of steps: some of them are enough
    shown = range(0, len(panel.places), 4 if many else 1)
    turned = sum(map(len, panel.places)) > 40 and not many
    axes.set_xticks(shown, [panel.places[place] for place in shown], rotation=30 if turned else 0, fontsize=8)
    axes.set_yscale("log" if panel.log else "linear")
    axes.set_title(panel.title, fontsize=9)
    axes.legend(fontsize=7, frameon=False)
    axes.grid(axis="y", color=PALETTE["grid"][0])
