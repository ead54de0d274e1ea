"""Training curves: the mean over seeds at every epoch, in a band from the lowest seed to the highest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..training.metrics import Metric
from ..training.results import Result
from .chart import HEIGHT, WIDTH, Frame, legend, padded, x_axis, y_axis
from .markup import counted
from .svg import Drawing, area, line, series_roles, unseen

MOST_POINTS = 80  # of a curve; more can't be told apart at this width


@dataclass(frozen=True)
class Curve:
    label: str
    role: str
    values: dict[int, list[float]]  # by epoch, a value a seed
    seeds: int

    def mean(self, epoch: int) -> float:
        return sum(self.values[epoch]) / len(self.values[epoch])


def curves_figure(results: Iterable[Result], metric: Metric, name: str) -> Drawing | None:
    """The whole curves of one comparison, of runs in progress too; None where no epoch was measured."""
    curves = curves_of(results, metric)
    if not curves:
        return None
    last = max(max(curve.values) for curve in curves)
    seen = [value for curve in curves for values in curve.values.values() for value in values]
    y0, y1 = padded(seen, 0.04, 0.05)
    frame = Frame(x0=0 if last > 1 else 0.5, x1=last if last > 1 else 1.5, y0=y0, y1=y1)
    marks = [*x_axis(frame, "epoch", whole=True), *y_axis(frame, metric.title)]
    lines: list[str] = []
    for curve in curves:
        values = curve.values
        upper = [(epoch, max(values[epoch])) for epoch in values]
        lower = [(epoch, min(values[epoch])) for epoch in reversed(values)]
        if curve.seeds > 1 and len(values) > 1:
            marks.append(area([(frame.x(x), frame.y(y)) for x, y in (*upper, *lower)], curve.role))
        points = [(frame.x(epoch), frame.y(curve.mean(epoch))) for epoch in values]
        if len(points) == 1:  # a run's first epoch: a blot, since a line needs two
            points.append((points[0][0] + 4, points[0][1]))
        lines.append(line(points, curve.role, 1.8 if len(values) > 1 else 5))
    made, end = legend([(curve.role, curve.label, "line") for curve in curves], 8, HEIGHT)
    counts = f"{counted(sum(c.seeds for c in curves), 'run')} in {counted(len(curves), 'method')}"
    about = f"{metric.title} at every epoch, the mean of {counts}; bands span the seeds."
    shown = (*marks, *lines, *_hints(frame, curves), *made)
    return Drawing(name=name, title="Training curves", about=about, width=WIDTH, height=end, marks=shown)


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
        if values:
            found.append(Curve(label, role, {e: values[e] for e in thinned(sorted(values))}, len(group)))
    return found


def thinned(epochs: Sequence[int]) -> list[int]:
    """At most MOST_POINTS of them, evenly, the first and the last always."""
    if len(epochs) <= MOST_POINTS:
        return list(epochs)
    step = (len(epochs) - 1) / (MOST_POINTS - 1)
    return [epochs[round(index * step)] for index in range(MOST_POINTS)]


def _hints(frame: Frame, curves: Sequence[Curve]) -> list[str]:
    """An unseen column an epoch, which shows every method's value there."""
    epochs = thinned(sorted({epoch for curve in curves for epoch in curve.values}))
    width = (frame.right - frame.left) / max(1, len(epochs))
    marks: list[str] = []
    for epoch in epochs:
        lines = [f"{curve.label} {curve.mean(epoch):.2f}" for curve in curves if epoch in curve.values]
        tip = "\n".join([f"epoch {epoch}", *lines[:14]])
        marks.append(unseen(frame.x(epoch) - width / 2, frame.top, width, frame.bottom - frame.top, tip))
    return marks
