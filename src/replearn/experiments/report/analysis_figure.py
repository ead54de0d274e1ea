"""An analysis as a picture: errors and bounds, recoverability, gradients, the trade-off of K, convergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...analysis import Analysis
from ..training.results import write_atomically
from .chart import ticks
from .scene import Disc, Drawing, Line, Mark, Text
from .svg import standalone_svg

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 380.0, 300.0, 52.0, 64.0, 52.0
LETTER = 5.6  # the width of a small letter


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
    """Write the picture as SVG."""
    write_atomically(path, standalone_svg(analysis_figure(analysis)))
    return path


def analysis_figure(analysis: Analysis) -> Drawing:
    panels = panels_of(analysis)
    columns = 3 if len(panels) > 4 else 2
    rows = -(-len(panels) // columns)
    title = f"{analysis.model}, {analysis.placement}: {analysis.num_samples} held-out samples"
    marks: list[Mark] = [Text(x=12, y=20, text=title, size=13, bold=True)]
    for number, panel in enumerate(panels):
        down, across = divmod(number, columns)
        marks += [moved(mark, across * WIDTH, 28 + down * HEIGHT) for mark in draw_panel(panel)]
    about = "; ".join(panel.title for panel in panels)
    size = {"width": columns * WIDTH, "height": 28 + rows * HEIGHT}
    return Drawing(name="analysis", title="Analysis", about=about, marks=tuple(marks), **size)


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
    if points := analysis.tradeoff:
        ks = [f"K = {point.interval}" for point in points]
        panels.append(Panel("What is left of the full model", ks, [
            Series("parameters", "series0", [[p.parameters] for p in points], joined=True),
            Series("FLOPs", "series1", [[p.flops] for p in points], joined=True),
            Series("C(K), the paper's", "muted", [[p.cost_formula] for p in points], joined=True, hollow=True),
        ]))  # fmt: skip
        panels.append(Panel("Predictions equal to the full model's, %, untrained", ks, [
            Series("operators", "repl", [[100 * p.operators.agreement] for p in points], joined=True),
            Series("removal", "removal", [[100 * p.removal.agreement] for p in points], joined=True),
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


def draw_panel(panel: Panel) -> list[Mark]:
    values = [v for series in panel.series for group in series.values for v in group if v > 0 or not panel.log]
    convert = math.log10 if panel.log else float
    low, high = (min(map(convert, values)), max(map(convert, values))) if values else (0.0, 1.0)
    low = min(low, 0.0) if not panel.log and low < 0.5 * high else low
    room = 0.06 * (high - low) or 0.5
    low, high = low - room, high + room
    bottom, inner = HEIGHT - BOTTOM, WIDTH - LEFT - 14

    def y(value: float) -> float:
        return TOP + (bottom - TOP) * (high - convert(value)) / (high - low)

    def x(place: float) -> float:
        return LEFT + inner * (place + 0.5) / len(panel.places)

    marks: list[Mark] = [Text(x=LEFT, y=16, text=panel.title, size=12)]
    for tick, _ in ticks(low, high, 5):
        value = 10.0**tick if panel.log else tick
        marks.append(Line(points=((LEFT, y(value)), (WIDTH - 14, y(value))), role="grid"))
        marks.append(Text(x=LEFT - 5, y=y(value) + 4, text=f"{value:.3g}", role="muted", size=10, anchor="end"))
    every = -(-len(panel.places) // max(1, int(inner / (LETTER * max(map(len, panel.places)) + 8))))
    for place, name in enumerate(panel.places):
        crowded = every > 1 and not name.isdigit()  # names take turns on three lines, numbers are left out
        if crowded or place % every == 0:
            down = 14 * (1 + (place % 3 if crowded else 0))
            marks.append(Text(x=x(place), y=bottom + down, text=name, role="muted", size=9.5, anchor="middle"))
    across = LEFT
    for number, series in enumerate(panel.series):
        points = [(x(place), y(v)) for place, group in enumerate(series.values) for v in group if v in values]
        if not points:
            continue
        if series.joined:
            marks.append(Line(points=tuple(points), role=series.role, width=1.6, dash=series.hollow))
        shift = 0.0 if series.joined else 7.0 * (number - (len(panel.series) - 1) / 2)
        marks += [Disc(x=a + shift, y=b, radius=3.2, role=series.role, hollow=series.hollow) for a, b in points]
        marks.append(Disc(x=across + 4, y=34, radius=3.2, role=series.role, hollow=series.hollow))
        marks.append(Text(x=across + 11, y=38, text=series.label, role="muted", size=10))
        across += 24 + LETTER * len(series.label)
    return marks


def moved(mark: Mark, right: float, down: float) -> Mark:
    if isinstance(mark, Line):
        return replace(mark, points=tuple((a + right, b + down) for a, b in mark.points))
    return replace(mark, x=mark.x + right, y=mark.y + down)
