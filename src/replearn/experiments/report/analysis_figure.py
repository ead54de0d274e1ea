"""An analysis as a picture: errors and bounds, recoverability, gradients, convergence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...analysis import Analysis
from ...compression.matplotlib_figure import new_figure, save
from .svg import PALETTE

Drawn = tuple[str, bool]  # the line between the dots, and whether these are hollow
FULL, HOLLOW, LINE, DASHES = ("", False), ("", True), ("-", False), ("--", True)


class Panel(NamedTuple):
    """Series by label: a role, how it is drawn, and values by place, several at one place or none."""

    title: str
    places: Sequence[str]
    series: dict[str, tuple[str, Drawn, Sequence[Sequence[float]]]]
    log: bool = False


def write_analysis(analysis: Analysis, path: Path) -> Path:
    """Draw the picture, as SVG or as the file's name says."""
    panels = panels_of(analysis)
    rows = -(-len(panels) // 2)
    figure = new_figure(8.8, 3.6 * rows)
    figure.suptitle(f"{analysis.model}, {analysis.placement}: {analysis.num_samples} held-out samples")
    for number, panel in enumerate(panels, start=1):
        draw_panel(figure.add_subplot(rows, 2, number), panel)
    return save(figure, path)


def panels_of(analysis: Analysis) -> list[Panel]:
    targets = analysis.targets
    names = [target.name for target in targets]
    made = [*(target.deviation for target in targets), analysis.together]
    spans = list(dict.fromkeys((d.role, d.span) for t in targets for d in t.distances))
    held = [[d for t in targets for d in t.distances if (d.role, d.span) == span] for span in spans]
    panels = [
        Panel("Local error: max |g(h) - f(h)| / max(|h|, 1)", names, {
            "removal": ("removal", HOLLOW, [[t.alone.removal] for t in targets]),
            "operator": ("repl", FULL, [[t.alone.epsilon] for t in targets]),
            "behind the ones before": ("ink", HOLLOW, [[t.together.epsilon] for t in targets]),
        }),
        Panel("Output deviation |F_RepL - F| and its bounds", [*names, "all"], {
            "bound as printed": ("muted", HOLLOW, [[d.printed] for d in made]),
            "bound": ("series0", HOLLOW, [[d.bound] for d in made]),
            "measured: largest": ("repl", FULL, [[d.measured] for d in made]),
            "mean": ("series5", FULL, [[d.mean] for d in made]),
        }, log=True),
        Panel("Removed weights' distance to neighbours' span", [f"{r} {s}" for r, s in spans], {
            "whole": ("series0", FULL, [[d.whole for d in group] for group in held]),
            "per row": ("repl", FULL, [[d.rows for d in group] for group in held]),
            "per head": ("series1", FULL, [[h for d in group for h in d.heads] for group in held]),
            "chance": ("muted", HOLLOW, [[d.chance for d in group] for group in held]),
        }),
    ]  # fmt: skip
    if analysis.gradient is not None:
        rows = analysis.gradient.rows()
        panels.append(Panel("Gradient bias |grad J - grad l| / |grad l|", list(rows), {
            "measured": ("repl", FULL, [[bias.measured / (bias.true or 1)] for bias in rows.values()]),
            "through the output": ("ink", HOLLOW, [[b.through_output / (b.true or 1)] for b in rows.values()]),
        }))  # fmt: skip
    if found := analysis.convergence:
        steps = [str(point.step) for point in found.points]
        bounds = [found.bound(number) for number in range(len(steps))]
        panels.append(Panel("Plain SGD: |grad J|^2 and its bound", steps, {
            "mean |grad J|^2": ("repl", LINE, [[mean] for mean, _, _ in bounds]),
            "start term": ("series0", LINE, [[start] for _, start, _ in bounds]),
            "noise term": ("series1", LINE, [[noise] for _, _, noise in bounds]),
            "J": ("muted", DASHES, [[point.loss] for point in found.points]),
        }, log=True))  # fmt: skip
        panels.append(Panel("Plain SGD: the full network's gradient", steps, {
            "|grad_s J|^2": ("repl", LINE, [[point.shared_squared] for point in found.points]),
            "|grad_s l|^2": ("series0", LINE, [[point.full_squared] for point in found.points]),
            "|bias|^2": ("series6", LINE, [[point.bias_squared] for point in found.points]),
        }, log=True))  # fmt: skip
    return panels


def draw_panel(axes: Any, panel: Panel) -> None:
    for number, (label, (role, (line, hollow), groups)) in enumerate(panel.series.items()):
        points = [(place, v) for place, group in enumerate(groups) for v in group if v > 0 or not panel.log]
        if points:
            shift = 0.0 if line else 0.12 * (number - (len(panel.series) - 1) / 2)
            places, values = [place + shift for place, _ in points], [value for _, value in points]
            colour = PALETTE[role][0]
            style = {"marker": "o", "ms": 4, "color": colour, "mfc": "none" if hollow else colour}
            axes.plot(places, values, linestyle=line, label=label, **style)
    many = len(panel.places) > 12  # numbers of steps: some of them are enough
    shown = range(0, len(panel.places), 4 if many else 1)
    turned = sum(map(len, panel.places)) > 40 and not many
    look = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if turned else {}
    broken = [panel.places[place].replace(" + ", "\n+ ").replace(", ", ",\n") for place in shown]
    axes.set_xticks(shown, broken, fontsize=9, **look)
    axes.set_yscale("log" if panel.log else "linear")
    axes.set_title(panel.title, fontsize=10)
    axes.tick_params(labelsize=9)
    axes.legend(fontsize=9, frameon=False)
    axes.grid(axis="y", color=PALETTE["grid"][0])
