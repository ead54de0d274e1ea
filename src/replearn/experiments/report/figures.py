"""The figures of a comparison: every run's score, the score against what it costs, and the training curves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ..training.compare import Comparison, Row
from ..training.comparison_table import heading, signed, spread
from ..training.metrics import Metric
from ..training.results import Result, write_atomically
from .chart import HEIGHT, WIDTH, Case, Dot, Frame, dot_figure, legend, padded, x_axis, y_axis
from .markup import counted
from .svg import Drawing, area, disc, line, series_roles, standalone_svg, unseen

LARGEST = 14.0  # the radius of the row with the most memory
MOST_POINTS = 80  # of a curve; more can't be told apart at this width


def draw(comparison: Comparison, path: str | Path) -> Path:
    path = Path(path)
    write_atomically(path, standalone_svg(runs_figure(comparison, "comparison", wide=True)))
    return path


def runs_figure(comparison: Comparison, name: str, *, wide: bool = False) -> Drawing:
    """A line a method; a wide picture, which has no table beside it, also says what each method costs."""
    metric, cases, rule = comparison.metric, [], None
    if wide:
        cases.append(Case(label=heading(comparison)))
    for row, role in zip(comparison.rows, series_roles([row.method for row in comparison.rows]), strict=True):
        dots = [
            Dot(value=score, role=role, faint=True, tip=f"{row.label}, seed {seed}\n{metric.text(score)}")
            for seed, score in zip(row.seeds, row.scores, strict=True)
            if math.isfinite(score) and len(row.scores) > 1
        ]
        if math.isfinite(row.score):
            std = row.std or 0.0
            tip = f"{row.label}\n{spread(row.score, row.std)} {metric.unit}"
            dots.append(Dot(value=row.score, low=row.score - std, high=row.score + std, role=role, tip=tip))
            if row.method == "e2e" and rule is None:
                rule = row.score, "E2E"
        cases.append(Case(label=in_words(row, wide), dots=tuple(dots)))
    return dot_figure(
        cases,
        name=name,
        title=f"{metric.name.capitalize()} of every run",
        about=f"{metric.title}: a faint dot a run, the mean over seeds with its standard deviation.",
        x_title=metric.title,
        rule=rule,
        width=2 * WIDTH if wide else WIDTH,
    )


def in_words(row: Row, costs: bool) -> str:
    parts = [f"{row.label}: {spread(row.score, row.std)}"]
    if row.against_e2e is not None:
        parts.append(f"{signed(row.against_e2e.mean)}, {row.against_e2e.verdict}")
    if costs and row.time_ratio is not None:
        parts.append(f"time {row.time_ratio:.2f}")
    if costs and row.memory_ratio is not None:
        parts.append(f"memory {row.memory_ratio:.2f} of E2E")
    return ", ".join(parts)


class Point(NamedTuple):
    """A bubble; its area is `size`, which like `x` is a ratio to E2E."""

    row: Row
    role: str
    x: float
    y: float
    std: float | None
    size: float
    paper: bool = False


def cost_figure(
    rows: Sequence[Row], variants: Mapping[str, Mapping[str, Any]], metric: Metric, name: str
) -> Drawing | None:
    """A bubble a method, the values of K joined, the paper's as rings.

    The score against time, area by memory; against FLOPs, area by parameters, where devices were shared.
    """
    rows = [row for row in rows if math.isfinite(row.score)]
    full = next((row for row in rows if row.method == "e2e"), None)
    if full is None or len(rows) < 2 or not full.flops or not full.parameters:
        return None  # nothing to compare, or to divide by
    timed = all(row is full or row.time_ratio is not None for row in rows)
    points: list[Point] = []
    for row, role in zip(rows, series_roles([row.method for row in rows]), strict=True):
        costs = row.flops / full.flops, row.parameters / full.parameters
        if timed:
            costs = row.time_ratio or 1.0, row.memory_ratio or 1.0
        points.append(Point(row, role, costs[0], row.score, row.std, costs[1]))
        if timed and row.paper is not None and row.paper_time_ratio:
            costs = row.paper_time_ratio, row.paper_memory_ratio or 1.0
            points.append(Point(row, role, costs[0], row.paper.score, row.paper.std, costs[1], paper=True))
    x0, x1 = padded([point.x for point in points], 0.2, 0.03)
    y0, y1 = padded([point.y + sign * (point.std or 0) for point in points for sign in (-1, 1)], 0.14)
    frame = Frame(x0=x0, x1=x1, y0=y0, y1=y1)
    marks = [
        line([frame.at(point.x, point.y) for point in family], family[0].role, 1.6)
        for family in _families(points, variants)
    ]
    largest = max(point.size for point in points)
    for point in sorted(points, key=lambda point: (not point.paper, -point.size)):
        if point.std:
            ends = [frame.at(point.x, point.y + sign * point.std) for sign in (-1, 1)]
            marks.append(line(ends, point.role, 1.4, point.paper))
        where = " in the paper" if point.paper else ""
        told = f"time {point.x:.3f}, memory" if timed else f"FLOPs {point.x:.3f}, parameters"
        score = f"{metric.name} {spread(point.y, point.std)} {metric.unit}"
        tip = f"{point.row.label}{where}\n{score}\n{told} {point.size:.3f} of E2E"
        look: dict[str, Any] = {"opacity": 1.0 if point.paper else 0.55, "hollow": point.paper, "tip": tip}
        radius = LARGEST * math.sqrt(point.size / largest)
        marks.append(disc(*frame.at(point.x, point.y), radius, point.role, **look))
    what, size = ("time of an epoch", "memory") if timed else ("FLOPs of a forward pass", "number of parameters")
    about = f"{metric.title} against the {what}, a ratio to E2E; the area of a bubble is the {size}."
    if any(point.paper for point in points):
        about += " Dashed rings are the paper's numbers, on its own hardware."
    signs = [(point.role, point.row.label, "dot") for point in points if not point.paper]
    made, end = legend(signs, 8, HEIGHT)
    axes = [*x_axis(frame, f"{what}, ratio to E2E"), *y_axis(frame, metric.title)]
    title = f"{metric.name.capitalize()} against cost"
    return Drawing(name=name, title=title, about=about, width=WIDTH, height=end, marks=(*axes, *marks, *made))


def _families(points: Sequence[Point], variants: Mapping[str, Mapping[str, Any]]) -> list[list[Point]]:
    """Our rows that differ in K alone, in its order."""

    def others(point: Point) -> str:
        return str({**variants[point.row.label], "label": "", "interval": ""})

    found = [point for point in points if not point.paper and point.row.method != "e2e"]
    found = [point for point in found if isinstance(variants.get(point.row.label, {}).get("interval"), int)]
    found.sort(key=lambda point: (others(point), variants[point.row.label]["interval"]))
    return [list(family) for _, family in groupby(found, others)]


def curves_figure(results: Iterable[Result], metric: Metric, name: str) -> Drawing | None:
    """The mean over seeds at every epoch, in a band from the lowest seed to the highest.

    Of the whole curves of one comparison, of runs in progress too; None where no epoch was measured.
    """
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.epochs:
            groups[str(result.variant["label"])].append(result)
    roles = dict(
        zip(groups, series_roles([str(runs[0].variant["method"]) for runs in groups.values()]), strict=True)
    )
    curves = {label: curve for label, runs in groups.items() if (curve := by_epoch(runs, metric))}
    if not curves:
        return None
    last = max(map(max, curves.values()))
    y0, y1 = padded(
        [value for curve in curves.values() for values in curve.values() for value in values], 0.04, 0.05
    )
    frame = Frame(x0=0 if last > 1 else 0.5, x1=last if last > 1 else 1.5, y0=y0, y1=y1)
    bands, lines = [], []
    for label, curve in curves.items():
        if len(groups[label]) > 1 and len(curve) > 1:
            edge = [(epoch, max(values)) for epoch, values in curve.items()]
            edge += [(epoch, min(values)) for epoch, values in reversed(curve.items())]
            bands.append(area([frame.at(*place) for place in edge], roles[label]))
        places = [frame.at(epoch, fmean(values)) for epoch, values in curve.items()]
        if len(places) == 1:  # a run's first epoch: a blot, since a line needs two
            places.append((places[0][0] + 4, places[0][1]))
        lines.append(line(places, roles[label], 1.8 if len(curve) > 1 else 5))
    runs = counted(sum(len(groups[label]) for label in curves), "run")
    about = f"{metric.title} at every epoch, the mean of {runs} in {counted(len(curves), 'method')}"
    about += "; bands span the seeds."
    made, end = legend([(roles[label], label, "line") for label in curves], 8, HEIGHT)
    axes = [*x_axis(frame, "epoch", whole=True), *y_axis(frame, metric.title)]
    marks = (*axes, *bands, *lines, *_hints(frame, curves), *made)
    return Drawing(name=name, title="Training curves", about=about, width=WIDTH, height=end, marks=marks)


def by_epoch(runs: Sequence[Result], metric: Metric) -> dict[int, list[float]]:
    """The values of all seeds at every epoch that is drawn."""
    found: dict[int, list[float]] = defaultdict(list)
    for result in runs:
        for epoch in result.epochs:
            if (value := metric.at(epoch.measures)) is not None:
                found[epoch.epoch].append(value)
    return {epoch: found[epoch] for epoch in thinned(sorted(found))}


def thinned(epochs: Sequence[int]) -> list[int]:
    """At most MOST_POINTS of them, evenly, the first and the last always."""
    if len(epochs) <= MOST_POINTS:
        return list(epochs)
    step = (len(epochs) - 1) / (MOST_POINTS - 1)
    return [epochs[round(index * step)] for index in range(MOST_POINTS)]


def _hints(frame: Frame, curves: Mapping[str, Mapping[int, Sequence[float]]]) -> list[str]:
    """An unseen column an epoch, which shows every method's value there."""
    epochs = thinned(sorted({epoch for curve in curves.values() for epoch in curve}))
    width = (frame.right - frame.left) / len(epochs)
    marks: list[str] = []
    for epoch in epochs:
        told = [f"{label} {fmean(curve[epoch]):.2f}" for label, curve in curves.items() if epoch in curve]
        tip = "\n".join([f"epoch {epoch}", *told[:14]])
        marks.append(unseen(frame.x(epoch) - width / 2, frame.top, width, frame.bottom - frame.top, tip))
    return marks
