"""The figures of a comparison: every run's score, the score against what it costs, and the training curves."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ..training.compare import Comparison, Row
from ..training.comparison_table import heading, signed, spread
from ..training.metrics import Metric
from ..training.results import Result, write_atomically
from .chart import HEIGHT, LETTER, LINE, WIDTH, Frame, Sign, legend, padded, x_axis, y_axis
from .markup import counted
from .svg import Drawing, area, disc, line, series_roles, standalone_svg, text, unseen

FAR = 5  # times the range of our scores
MOST_POINTS = 80  # of a curve; more can't be told apart at this width


def draw(comparison: Comparison, path: str | Path) -> Path:
    path = Path(path)
    write_atomically(path, standalone_svg(runs_figure(comparison, "comparison", wide=True)))
    return path


def runs_figure(comparison: Comparison, name: str, *, wide: bool = False) -> Drawing:
    """A line a method; a wide picture, which has no table beside it, also says what each method costs."""
    metric, rows = comparison.metric, comparison.rows
    width, top = (2 * WIDTH, 8 + LINE) if wide else (WIDTH, 8.0)
    height = 1.9 * LINE
    scores = [score for row in rows for score in (*row.scores, row.score) if math.isfinite(score)]
    x0, x1 = padded(scores or [0.0], 0.06, 0.01)
    frame = Frame(x0=x0, x1=x1, left=10, top=8, bottom=top + height * len(rows) + 6, width=width)
    marks, signs = x_axis(frame, metric.title), list[Sign]()
    full = next((row.score for row in rows if row.method == "e2e" and math.isfinite(row.score)), None)
    if full is not None:
        marks.append(line([(frame.x(full), frame.top), (frame.x(full), frame.bottom)], "e2e", 1.6, dash=True))
        signs.append(("e2e", "E2E", "dash"))
    most = int(width / LETTER) - 1
    if wide:
        marks.append(text(2, 22, shortened(heading(comparison), most), more='font-weight="600"'))
    for number, (row, role) in enumerate(zip(rows, series_roles([row.method for row in rows]), strict=True)):
        y = top + number * height
        words = in_words(row) if wide else f"{row.label}: {spread(row.score, row.std)}"
        marks.append(text(8, y + 14, shortened(words, most), "muted"))
        marks += _dots(frame, row, role, metric, y + 1.45 * LINE)
    made, end = legend(signs, 8, frame.bottom + 44, width)
    about = f"{metric.title}: a faint dot a run, the mean over seeds with its standard deviation."
    return Drawing(name=name, title="Every run", about=about, width=width, height=end, marks=(*marks, *made))


def _dots(frame: Frame, row: Row, role: str, metric: Metric, y: float) -> list[str]:
    """A row's runs, if there are several, and their mean."""
    marks = [
        disc(frame.x(score), y, 4, role, opacity=0.35, tip=f"{row.label}, seed {seed}\n{metric.text(score)}")
        for seed, score in zip(row.seeds, row.scores, strict=True)
        if math.isfinite(score) and len(row.scores) > 1
    ]
    if math.isfinite(row.score):
        if row.std:
            ends = [(frame.x(row.score + sign * row.std), y) for sign in (-1, 1)]
            marks.append(line(ends, role, 1.8))
        tip = f"{row.label}\n{spread(row.score, row.std)} {metric.unit}"
        marks.append(disc(frame.x(row.score), y, 5, role, tip=tip))
    return marks


def shortened(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1] + "…"


def in_words(row: Row, *, removal: bool = False) -> str:
    parts = [f"{row.label} {spread(row.score, row.std)}"]
    for name, found in (("E2E", row.against_e2e), ("removal", row.against_removal if removal else None)):
        parts += [f"{found.verdict} against {name} ({signed(found.mean)})"] if found else []
    costs = {"time": row.time_ratio, "memory": row.memory_ratio} if row.method != "e2e" else {}
    told = ", ".join(f"{name} {value:.2f}" for name, value in costs.items() if value is not None)
    return ", ".join([*parts, *([f"{told} of E2E"] if told else [])])


class Point(NamedTuple):
    """A score and what it costs, as ratios to E2E; hollow if the paper's."""

    label: str
    role: str
    score: float
    std: float | None
    cost: float
    memory: float | None
    hollow: bool = False


def cost_figure(rows: Sequence[Row], metric: Metric, name: str) -> Drawing | None:
    """The score against the time of an epoch, the paper's as rings; against FLOPs, where devices were shared."""
    rows = [row for row in rows if math.isfinite(row.score)]
    full = next((row for row in rows if row.method == "e2e"), None)
    if full is None or len(rows) < 2 or not full.flops:
        return None  # nothing to compare, or to divide by
    timed = all(row is full or row.time_ratio is not None for row in rows)
    points: list[Point] = []
    for row, role in zip(rows, series_roles([row.method for row in rows]), strict=True):
        cost = row.time_ratio or 1.0 if timed else row.flops / full.flops
        points.append(Point(row.label, role, row.score, row.std, cost, row.memory_ratio if timed else None))
        if timed and (paper := row.paper) is not None and row.paper_time_ratio:
            printed = f"{row.label} in the paper", role, paper.score, paper.std
            points.append(Point(*printed, row.paper_time_ratio, row.paper_memory_ratio, hollow=True))
    (y0, y1), (least, most) = (extent([p for p in points if p.hollow <= rings]) for rings in (False, True))
    far = most - least > FAR * (y1 - y0)  # rings that would leave ours a single spot
    points = [point for point in points if not (far and point.hollow)]
    x0, x1 = padded([point.cost for point in points], 0.2, 0.03)
    y0, y1 = padded(extent(points), 0.14)
    frame = Frame(x0=x0, x1=x1, y0=y0, y1=y1)
    marks: list[str] = []
    for point in points:
        if point.std:
            ends = [frame.at(point.cost, point.score + sign * point.std) for sign in (-1, 1)]
            marks.append(line(ends, point.role, 1.4, point.hollow))
        tip = f"{point.label}\n{metric.name} {spread(point.score, point.std)} {metric.unit}"
        tip += f"\n{'time' if timed else 'FLOPs'} {point.cost:.3f} of E2E"
        tip += f", memory {point.memory:.3f}" if point.memory else ""
        place = frame.at(point.cost, point.score)
        marks.append(disc(*place, 6, point.role, hollow=point.hollow, tip=tip))
    what = "time of an epoch" if timed else "FLOPs of a forward pass"
    about = f"{metric.title} against the {what}, a ratio to E2E."
    if any(point.hollow for point in points):
        about += " Dashed rings are the paper's numbers, on its own hardware."
    about += " The paper's numbers lie too far away to be drawn." if far else ""
    signs = [(point.role, point.label, "dot") for point in points if not point.hollow]
    made, end = legend(signs, 8, HEIGHT)
    axes = [*x_axis(frame, f"{what}, ratio to E2E"), *y_axis(frame, metric.title)]
    return Drawing(
        name=name, title="Score against cost", about=about, width=WIDTH, height=end, marks=(*axes, *marks, *made)
    )


def extent(points: Sequence[Point]) -> tuple[float, float]:
    ends = [point.score + sign * (point.std or 0) for point in points for sign in (-1, 1)]
    return min(ends), max(ends)


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
    step = (len(epochs) - 1) / (MOST_POINTS - 1)
    return sorted({epochs[round(index * step)] for index in range(MOST_POINTS)})


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
