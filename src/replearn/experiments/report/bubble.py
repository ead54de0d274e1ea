"""The bubble figure: what is reached against the memory it takes; the area of a bubble is the time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..training.compare import Row
from ..training.metrics import Metric
from .axes import WIDTH, Frame, beside, draw_axes, padded, spread_labels
from .scene import Disc, Drawing, Line, Mark, series_roles

LARGEST = 22.0  # the radius of the most expensive row


@dataclass(frozen=True)
class Bubble:
    label: str
    role: str
    x: float
    y: float
    std: float | None
    size: float
    paper: bool
    tip: str


def bubble_figure(rows: Sequence[Row], metric: Metric, name: str) -> Drawing:
    """The score against memory, area by time; against parameters, area by FLOPs, where devices were shared."""
    measured = all(row.alone and row.memory > 0 for row in rows)
    roles = series_roles([row.method for row in rows])
    found = [_ours(row, role, metric, measured) for row, role in zip(rows, roles, strict=True)]
    if measured:
        found += [
            _papers(row, role, metric)
            for row, role in zip(rows, roles, strict=True)
            if row.paper and row.paper.memory_gb and _paper_time(row)
        ]
    bubbles = [bubble for bubble in found if math.isfinite(bubble.y)]
    if not bubbles:
        return Drawing(name=name, title="", about="", width=WIDTH, height=1, marks=())
    x0, x1 = padded([bubble.x for bubble in bubbles], 0.2, 0.1 * max(bubble.x for bubble in bubbles))
    y0, y1 = padded([b.y + sign * (b.std or 0) for b in bubbles for sign in (-1, 1)], 0.14)
    frame = Frame(x0=max(x0, 0), x1=x1, y0=y0, y1=y1)
    x_title = "peak memory, GB" if measured else "parameters, millions"
    area = "time of an epoch" if measured else "FLOPs of a forward pass"
    marks = draw_axes(frame, x_title, metric.title)
    marks += _bubbles(frame, bubbles)
    about = f"{metric.title} against {x_title}; the area of a bubble is the {area}."
    if any(bubble.paper for bubble in bubbles):
        about += " Dashed rings are the paper's numbers, on its own hardware; their area is on its own scale."
    title = f"{metric.name.capitalize()} against {'memory' if measured else 'parameters'}"
    return Drawing(name=name, title=title, about=about, width=frame.width, height=frame.height, marks=tuple(marks))


def _ours(row: Row, role: str, metric: Metric, measured: bool) -> Bubble:
    x = row.memory / 1e9 if measured else row.parameters / 1e6
    size = row.seconds if measured else row.flops
    spread = f" ± {row.std:.2f}" if row.std is not None else ""
    cost = (
        f"{row.memory / 1e9:.2f} GB, {row.seconds:.2f} s an epoch"
        if measured
        else f"{row.parameters:,} parameters, {row.flops / 1e6:,.1f} MFLOPs"
    )
    seeds = f"{len(row.seeds)} seed{'s' if len(row.seeds) != 1 else ''}"
    tip = f"{row.label}\n{metric.name} {row.score:.2f}{spread} {metric.unit}\n{cost}\n{seeds}"
    return Bubble(row.label, role, x, row.score, row.std, size, False, tip)


def _papers(row: Row, role: str, metric: Metric) -> Bubble:
    paper = row.paper
    assert paper is not None
    assert paper.memory_gb is not None
    seconds = _paper_time(row)
    spread = f" ± {paper.std:.2f}" if paper.std is not None else ""
    tip = f"{row.label} in the paper\n{metric.name} {paper.score:.2f}{spread} {metric.unit}\n"
    tip += f"{paper.memory_gb:.2f} GB, {seconds:.2f} s an epoch"
    return Bubble(row.label, role, paper.memory_gb, paper.score, paper.std, seconds, True, tip)


def _paper_time(row: Row) -> float:
    return (row.paper.seconds_per_epoch or 0.0) if row.paper else 0.0


def _bubbles(frame: Frame, bubbles: Sequence[Bubble]) -> list[Mark]:
    """The paper's rings below, then ours from large to small, each with its label beside it."""
    largest = {paper: max((b.size for b in bubbles if b.paper == paper), default=0.0) for paper in (True, False)}
    order = sorted(bubbles, key=lambda bubble: (not bubble.paper, -bubble.size))
    ours = [bubble for bubble in order if not bubble.paper]
    heights = spread_labels([frame.y(bubble.y) + 4 for bubble in ours], 13, 26, frame.height - 52)
    marks: list[Mark] = []
    labels: list[Mark] = []
    for bubble in order:
        x, y = frame.x(bubble.x), frame.y(bubble.y)
        share = bubble.size / largest[bubble.paper] if largest[bubble.paper] > 0 else 1.0
        radius = max(4.0, LARGEST * math.sqrt(max(share, 0.0)))
        if bubble.std:
            points = ((x, frame.y(bubble.y - bubble.std)), (x, frame.y(bubble.y + bubble.std)))
            marks.append(Line(points=points, role=bubble.role, width=1.2, dash=bubble.paper))
        marks.append(
            Disc(
                x=x,
                y=y,
                radius=radius,
                role=bubble.role,
                hollow=bubble.paper,
                opacity=1 if bubble.paper else 0.55,
                tip=bubble.tip,
            )
        )
        if bubble.paper:
            continue
        marks.append(Disc(x=x, y=y, radius=1.8, role=bubble.role))
        if len(ours) <= 14:  # more would be a blot: then the hints name them
            height = heights[ours.index(bubble)]
            labels.append(beside(frame, x, height, radius + 5, bubble.label, bubble.role))
    return marks + labels
