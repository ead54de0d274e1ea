"""Training curves: the mean over seeds at every epoch, in a band from the lowest seed to the highest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..training.metrics import Metric
from ..training.results import Result
from .axes import HEIGHT, LEFT, TOP, WIDTH, Frame, draw_axes
from .markup import counted
from .scene import Area, Box, Drawing, Line, Mark, Points, Text, series_roles

MOST_POINTS = 80  # of a curve; more can't be told apart at this width


@dataclass(frozen=True)
class Curve:
    label: str
    role: str
    epochs: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int


def curves_figure(results: Iterable[Result], metric: Metric, name: str) -> Drawing | None:
    """The curves of one comparison, of runs in progress too; None where no epoch was measured."""
    curves = curves_of(results, metric)
    if not curves:
        return None
    last = max(curve.epochs[-1] for curve in curves)
    y0, y1 = focus([value for curve in curves for value in tail(curve)], metric)
    legend = _legend_rows([curve.label for curve in curves])
    extra = 16.0 * len(legend)
    frame = Frame(x0=0 if last > 1 else 0.5, x1=last if last > 1 else 1.5, y0=y0, y1=y1, height=HEIGHT)
    marks = draw_axes(frame, "epoch", metric.title, whole_x=True)
    for curve in curves:
        band = [
            *zip(curve.epochs, curve.high, strict=True),
            *reversed([*zip(curve.epochs, curve.low, strict=True)]),
        ]
        if curve.seeds > 1 and len(curve.epochs) > 1:
            marks.append(Area(points=tuple((frame.x(x), _inside(frame, y)) for x, y in band), role=curve.role))
    for curve in curves:
        points = _visible(frame, curve)
        if len(points) > 1:
            marks.append(Line(points=points, role=curve.role, width=1.8))
        else:
            marks.append(Line(points=(points[0], (points[0][0] + 3, points[0][1])), role=curve.role, width=5))
    marks += _hints(frame, curves)
    marks += _legend(legend, {curve.label: curve.role for curve in curves})
    runs = sum(curve.seeds for curve in curves)
    counts = f"{counted(runs, 'run')} in {counted(len(curves), 'method')}"
    about = f"{metric.title} at every epoch, the mean of {counts}; bands span the seeds."
    return Drawing(
        name=name,
        title="Training curves",
        about=about,
        width=WIDTH,
        height=HEIGHT + extra,
        marks=tuple(marks),
    )


def curves_of(results: Iterable[Result], metric: Metric) -> list[Curve]:
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.epochs:
            groups[str(result.variant["label"])].append(result)
    roles = series_roles([str(group[0].variant["method"]) for group in groups.values()])
    found = []
    for (label, group), role in zip(groups.items(), roles, strict=True):
        values: dict[int, list[float]] = defaultdict(list)
        for result in group:
            for epoch in result.epochs:
                if (value := metric.at(epoch.measures)) is not None:
                    values[epoch.epoch].append(value)
        if not values:
            continue
        epochs = thinned(sorted(values))
        found.append(
            Curve(
                label,
                role,
                tuple(epochs),
                tuple(sum(values[epoch]) / len(values[epoch]) for epoch in epochs),
                tuple(min(values[epoch]) for epoch in epochs),
                tuple(max(values[epoch]) for epoch in epochs),
                len(group),
            )
        )
    return found


def thinned(epochs: Sequence[int]) -> list[int]:
    """At most MOST_POINTS of them, evenly, the first and the last always."""
    if len(epochs) <= MOST_POINTS:
        return list(epochs)
    step = (len(epochs) - 1) / (MOST_POINTS - 1)
    return [epochs[round(index * step)] for index in range(MOST_POINTS)]


def tail(curve: Curve) -> list[float]:
    """The part that one looks at: a network's first epochs are far off and would flatten the rest."""
    start = len(curve.epochs) // 6
    return [*curve.low[start:], *curve.high[start:]]


def focus(values: Sequence[float], metric: Metric) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = max(0.05 * (high - low), 0.05)
    return (max(0.0, low - room) if low >= 0 else low - room), (
        min(100.0, high + room) if metric.unit == "%" else high + room
    )


def _inside(frame: Frame, value: float) -> float:
    return frame.y(min(max(value, frame.y0), frame.y1))


def _visible(frame: Frame, curve: Curve) -> Points:
    """The curve without its start outside of the frame, but for the last point before it comes in."""
    outside = [not frame.y0 <= value <= frame.y1 for value in curve.mean]
    start = next((index for index, out in enumerate(outside) if not out), len(outside) - 1)
    start = max(0, start - 1)
    pairs = list(zip(curve.epochs, curve.mean, strict=True))[start:]
    return tuple((frame.x(x), _inside(frame, y)) for x, y in pairs)


def _hints(frame: Frame, curves: Sequence[Curve]) -> list[Mark]:
    """An unseen column an epoch, which shows every method's value there."""
    epochs = thinned(sorted({epoch for curve in curves for epoch in curve.epochs}))[:MOST_POINTS]
    values = [dict(zip(curve.epochs, curve.mean, strict=True)) for curve in curves]
    width = (frame.x(frame.x1) - LEFT) / max(1, len(epochs))
    marks: list[Mark] = []
    for epoch in epochs:
        lines = [
            f"{curve.label} {held[epoch]:.2f}" for curve, held in zip(curves, values, strict=True) if epoch in held
        ]
        tip = "\n".join([f"epoch {epoch}", *lines[:14]])
        x = frame.x(epoch) - width / 2
        height = frame.y(frame.y0) - TOP
        marks.append(Box(x=x, y=TOP, width=width, height=height, role="ground", opacity=0, tip=tip))
    return marks


def _legend_rows(labels: Sequence[str]) -> list[list[str]]:
    rows: list[list[str]] = [[]]
    used = 0.0
    for label in labels:
        need = 30 + 6.6 * len(label)
        if rows[-1] and used + need > WIDTH - LEFT:
            rows.append([])
            used = 0.0
        rows[-1].append(label)
        used += need
    return rows


def _legend(rows: Sequence[Sequence[str]], roles: dict[str, str]) -> list[Mark]:
    marks: list[Mark] = []
    for number, row in enumerate(rows):
        x, y = LEFT, HEIGHT + 10.0 + 16 * number
        for label in row:
            marks.append(Line(points=((x, y - 4), (x + 16, y - 4)), role=roles[label], width=3))
            marks.append(Text(x=x + 21, y=y, text=label, size=11.5))
            x += 30 + 6.6 * len(label)
    return marks
