"""The frontier over K: what is reached against what it costs, a line for each way of choosing K."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ..training.compare import Row
from ..training.metrics import Metric
from .axes import Frame, beside, draw_axes, padded, spread_labels
from .scene import Disc, Drawing, Line, Mark, series_roles


def frontier_figure(
    rows: Sequence[Row], variants: Mapping[str, Mapping[str, Any]], metric: Metric, name: str
) -> Drawing | None:
    """The score against the time of an epoch as a share of E2E's, or FLOPs where times can't be compared.

    None with fewer than two rows that have a finite score, or with no E2E to divide by.
    """
    rows = [row for row in rows if math.isfinite(row.score)]
    full = next((row for row in rows if row.method == "e2e"), None)
    if full is None or len(rows) < 2 or not full.flops:
        return None
    timed = all(row is full or row.time_ratio is not None for row in rows)
    cost = {row.label: _cost(row, full, timed) for row in rows}
    roles = dict(zip([row.label for row in rows], series_roles([row.method for row in rows]), strict=True))
    x0, x1 = padded(list(cost.values()), 0.12, 0.03)
    y0, y1 = padded([row.score + sign * (row.std or 0) for row in rows for sign in (-1, 1)], 0.1)
    frame = Frame(x0=x0, x1=x1, y0=y0, y1=y1)
    x_title = f"{'time of an epoch' if timed else 'FLOPs of a forward pass'}, ratio to E2E"
    marks = draw_axes(frame, x_title, metric.title)
    marks.append(Line(points=_stairs(frame, rows, cost, metric), role="muted", width=1.2, dash=True))
    families: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        variant = variants.get(row.label, {})
        if row.method != "e2e":
            families[row.method, str(variant.get("operator")), variant.get("first") is None].append(row)
    for family in families.values():
        points = tuple((frame.x(cost[row.label]), frame.y(row.score)) for row in _by_interval(family, variants))
        if len(points) > 1:
            marks.append(Line(points=points, role=roles[family[0].label], width=1.6))
    marks += _points(frame, rows, cost, roles, variants, metric)
    intervals = {_interval(row, variants) or 0 for row in rows if row.method != "e2e"} - {0}
    named = ", ".join(f"K = {interval}" for interval in sorted(intervals))
    about = (
        f"{metric.title} against {x_title}, for {named or 'every method'}. The dashed stairs are the frontier: "
    )
    about += "nothing measured is both cheaper and better."
    title = "Cost against " + metric.name + (" over K" if len(intervals) > 1 else "")
    return Drawing(name=name, title=title, about=about, width=frame.width, height=frame.height, marks=tuple(marks))


def _cost(row: Row, full: Row, timed: bool) -> float:
    return (1.0 if row is full else row.time_ratio or 1.0) if timed else row.flops / full.flops


def _interval(row: Row, variants: Mapping[str, Mapping[str, Any]]) -> int | None:
    value = variants.get(row.label, {}).get("interval")
    return value if isinstance(value, int) else None


def _by_interval(family: Sequence[Row], variants: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    return sorted(family, key=lambda row: _interval(row, variants) or 0)


def frontier(rows: Sequence[Row], cost: Mapping[str, float], metric: Metric) -> list[Row]:
    """The rows that no other row beats in both, from the cheapest on."""
    kept: list[Row] = []
    for row in sorted(rows, key=lambda row: (cost[row.label], -metric.sign * row.score)):
        if not kept or metric.sign * (row.score - kept[-1].score) > 0:
            kept.append(row)
    return kept


def _stairs(
    frame: Frame, rows: Sequence[Row], cost: Mapping[str, float], metric: Metric
) -> tuple[tuple[float, float], ...]:
    points: list[tuple[float, float]] = []
    for row in frontier(rows, cost, metric):
        x, y = frame.x(cost[row.label]), frame.y(row.score)
        if points:
            points.append((x, points[-1][1]))
        points.append((x, y))
    points.append((frame.x(frame.x1), points[-1][1]))
    return tuple(points)


def _points(
    frame: Frame,
    rows: Sequence[Row],
    cost: Mapping[str, float],
    roles: Mapping[str, str],
    variants: Mapping[str, Mapping[str, Any]],
    metric: Metric,
) -> list[Mark]:
    heights = spread_labels([frame.y(row.score) - 5 for row in rows], 13, 26, frame.height - 52)
    marks: list[Mark] = []
    for row, height in zip(rows, heights, strict=True):
        x, y = frame.x(cost[row.label]), frame.y(row.score)
        interval = _interval(row, variants)
        where = "" if row.method == "e2e" or interval is None else f"\nK = {interval}"
        spread = f" ± {row.std:.2f}" if row.std is not None else ""
        tip = f"{row.label}\n{metric.name} {row.score:.2f}{spread} {metric.unit}\n"
        tip += f"cost {cost[row.label]:.3f} of E2E{where}"
        if row.std:
            points = ((x, frame.y(row.score - row.std)), (x, frame.y(row.score + row.std)))
            marks.append(Line(points=points, role=roles[row.label], width=1.2))
        marks.append(Disc(x=x, y=y, radius=5.5, role=roles[row.label], tip=tip))
        if len(rows) <= 14:
            marks.append(beside(frame, x, height, 10, row.label, roles[row.label]))
    return marks
