"""What is reached against what it costs: a bubble a method, the values of K joined, the paper's as rings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..training.compare import Row
from ..training.comparison_table import spread
from ..training.metrics import Metric
from .chart import HEIGHT, WIDTH, Frame, legend, padded, x_axis, y_axis
from .svg import Drawing, disc, line, series_roles

LARGEST = 14.0  # the radius of the row with the most memory


@dataclass(frozen=True)
class Point:
    label: str
    role: str
    x: float
    y: float
    std: float | None
    size: float  # over E2E's: the area of its disc
    tip: str
    paper: bool = False


def cost_figure(
    rows: Sequence[Row], variants: Mapping[str, Mapping[str, Any]], metric: Metric, name: str
) -> Drawing | None:
    """The score against time, area by memory; against FLOPs, area by parameters, where devices were shared."""
    rows = [row for row in rows if math.isfinite(row.score)]
    full = next((row for row in rows if row.method == "e2e"), None)
    if full is None or len(rows) < 2 or not full.flops or not full.parameters:
        return None  # nothing to compare, or to divide by
    timed = all(row is full or row.time_ratio is not None for row in rows)
    what, area = ("time of an epoch", "memory") if timed else ("FLOPs of a forward pass", "number of parameters")
    points: list[Point] = []
    for row, role in zip(rows, series_roles([row.method for row in rows]), strict=True):
        found = [(row.score, row.std, row.time_ratio or 1.0, row.memory_ratio or 1.0, "")]
        if not timed:
            found = [(row.score, row.std, row.flops / full.flops, row.parameters / full.parameters, "")]
        elif (paper := row.paper) is not None and row.paper_time_ratio:
            costs = (row.paper_time_ratio, row.paper_memory_ratio or 1.0)
            found.append((paper.score, paper.std, *costs, " in the paper"))
        for score, std, x, size, where in found:
            told = f"time {x:.3f}, memory {size:.3f}" if timed else f"FLOPs {x:.3f}, parameters {size:.3f}"
            tip = f"{row.label}{where}\n{metric.name} {spread(score, std)} {metric.unit}\n{told} of E2E"
            points.append(Point(row.label, role, x, score, std, size, tip, bool(where)))
    x0, x1 = padded([point.x for point in points], 0.2, 0.03)
    y0, y1 = padded([point.y + sign * (point.std or 0) for point in points for sign in (-1, 1)], 0.14)
    frame = Frame(x0=x0, x1=x1, y0=y0, y1=y1)
    marks = [*x_axis(frame, f"{what}, ratio to E2E"), *y_axis(frame, metric.title)]
    for family in _families(points, variants):
        marks.append(line([(frame.x(point.x), frame.y(point.y)) for point in family], family[0].role, 1.6))
    largest = max(point.size for point in points)
    for point in sorted(points, key=lambda point: (not point.paper, -point.size)):
        x, y = frame.x(point.x), frame.y(point.y)
        if point.std:
            ends = [(x, frame.y(point.y - point.std)), (x, frame.y(point.y + point.std))]
            marks.append(line(ends, point.role, 1.4, point.paper))
        radius, faint = LARGEST * math.sqrt(point.size / largest), 1.0 if point.paper else 0.55
        marks.append(disc(x, y, radius, point.role, opacity=faint, hollow=point.paper, tip=point.tip))
    made, end = legend([(point.role, point.label, "dot") for point in points if not point.paper], 8, HEIGHT)
    about = f"{metric.title} against the {what}, a ratio to E2E; the area of a bubble is the {area}."
    if any(point.paper for point in points):
        about += " Dashed rings are the paper's numbers, on its own hardware."
    title = f"{metric.name.capitalize()} against cost"
    return Drawing(name=name, title=title, about=about, width=WIDTH, height=end, marks=(*marks, *made))


def _families(points: Sequence[Point], variants: Mapping[str, Mapping[str, Any]]) -> list[list[Point]]:
    """Our rows that differ in K alone, in its order."""
    families: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        variant = variants.get(point.label, {})
        if not point.paper and isinstance(variant.get("interval"), int) and variant.get("method") != "e2e":
            families[str({**variant, "label": "", "interval": ""})].append(point)
    return [sorted(family, key=lambda point: variants[point.label]["interval"]) for family in families.values()]
