"""The picture of a comparison: every run's score, each method's spread and verdict, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from ..training.compare import Comparison, Row
from ..training.comparison_table import heading, signed, spread
from ..training.intervals import Difference
from .axes import padded, tick_text, ticks
from .png import write_png
from .scene import Box, Disc, Drawing, Line, Mark, Text, series_roles

TOP, ROW, LABELS, GAP = 62.0, 32.0, 150.0, 18.0
SCORES, WORDS, COSTS = 300.0, 116.0, 220.0  # widths: the scores, one column of words, the costs
VERDICTS = {"better": "series1", "worse": "series6", "undecided": "muted"}


def draw(comparison: Comparison, path: str | Path) -> Path:
    """Write the picture as PNG; ReplearnError where matplotlib is missing or the file can't be written."""
    path = Path(path)
    write_png(overview_figure(comparison), path)
    return path


def overview_figure(comparison: Comparison) -> Drawing:
    """Rows from top to bottom; from left to right labels, scores, numbers in words, costs."""
    rows = comparison.rows
    bottom = TOP + ROW * len(rows)
    roles = series_roles([row.method for row in rows])
    marks: list[Mark] = [Text(x=10, y=20, text=heading(comparison), size=13, bold=True)]
    for number, (row, role) in enumerate(zip(rows, roles, strict=True)):
        label = row.label if len(row.label) < 24 else row.label[:22] + "…"
        marks.append(Text(x=LABELS - 10, y=_middle(number) + 4, text=label, role=role, anchor="end"))
    marks += _scores(rows, roles, bottom, comparison.metric.title)
    columns = _words(rows)
    for place, (head, cells) in enumerate(columns.items()):
        x = LABELS + SCORES + GAP + (place + 0.5) * WORDS
        marks.append(Text(x=x, y=TOP - 8, text=head, role="muted", size=11, anchor="middle"))
        for number, (text, role) in enumerate(cells):
            marks.append(Text(x=x, y=_middle(number) + 4, text=text, role=role, size=11.5, anchor="middle"))
    left = LABELS + SCORES + 2 * GAP + len(columns) * WORDS
    marks += _costs(rows, left, bottom)
    width = left + COSTS + GAP
    about = f"{comparison.metric.title} of every run, differences with verdicts, and costs."
    return Drawing(
        name="comparison", title="Comparison", about=about, width=width, height=bottom + 44, marks=tuple(marks)
    )


def _middle(number: int) -> float:
    return TOP + ROW * (number + 0.5)


def _scores(rows: Sequence[Row], roles: Sequence[str], bottom: float, title: str) -> list[Mark]:
    """A faint dot for each run, the mean with its standard deviation, a dashed rule at E2E's mean."""
    ends = [row.score + sign * (row.std or 0) for row in rows for sign in (-1, 1)]
    values = [value for value in (*ends, *(s for row in rows for s in row.scores)) if math.isfinite(value)]
    low, high = padded(values or [0.0], 0.1)
    place = _scale(LABELS, SCORES, low, high)
    marks = _axis(place, low, high, bottom, title, LABELS + SCORES / 2)
    full = next((row.score for row in rows if row.method == "e2e" and math.isfinite(row.score)), None)
    if full is not None:
        marks.append(Line(points=((place(full), TOP), (place(full), bottom)), role="e2e", dash=True))
    for number, (row, role) in enumerate(zip(rows, roles, strict=True)):
        y = _middle(number)
        marks += [
            Disc(x=place(score), y=y, radius=3.5, role=role, opacity=0.4)
            for score in row.scores
            if math.isfinite(score)
        ]
        if math.isfinite(row.score):
            ends_of = tuple((place(row.score + sign * (row.std or 0)), y) for sign in (-1, 1))
            marks += [
                Line(points=ends_of, role=role, width=1.6),
                Disc(x=place(row.score), y=y, radius=5, role=role),
            ]
    return marks


def _words(rows: Sequence[Row]) -> dict[str, list[tuple[str, str]]]:
    columns = {"mean ± std": [(spread(row.score, row.std), "ink") for row in rows]}
    for head, found in (
        ("against E2E", [row.against_e2e for row in rows]),
        ("against removal", [row.against_removal for row in rows]),
    ):
        if any(found):
            columns[head] = [_verdict(difference) for difference in found]
    return columns


def _verdict(difference: Difference | None) -> tuple[str, str]:
    if difference is None:
        return "", "muted"
    return f"{signed(difference.mean)} {difference.verdict}", VERDICTS[difference.verdict]


def _costs(rows: Sequence[Row], left: float, bottom: float) -> list[Mark]:
    """Time as a bar and memory as a ring, as ratios to E2E; seconds where there is none to divide by."""
    relative = any(row.time_ratio is not None for row in rows)
    times = [row.time_ratio if relative else row.seconds if row.alone else None for row in rows]
    memory = [row.memory_ratio for row in rows]
    high = max([1e-9, *(value for value in (*times, *memory) if value is not None and math.isfinite(value))])
    place = _scale(left, COSTS, 0.0, 1.05 * high)
    title = "time (bar) and memory (ring), ratio to E2E" if relative else "seconds an epoch"
    marks = _axis(place, 0.0, 1.05 * high, bottom, title, left + COSTS / 2)
    for number, (time, ring) in enumerate(zip(times, memory, strict=True)):
        y = _middle(number)
        text = "not measured alone" if time is None else f"{time:.2f}" if relative else f"{time:.1f} s"
        if time is not None and math.isfinite(time):
            marks.append(Box(x=left, y=y - 8, width=max(0.0, place(time) - left), height=16, role="kept"))
        marks.append(Text(x=left + 5, y=y + 4, text=text, size=11))
        if ring is not None and math.isfinite(ring):
            marks.append(Disc(x=place(ring), y=y, radius=5, role="series0", hollow=True))
    return marks


def _scale(left: float, width: float, low: float, high: float) -> Callable[[float], float]:
    return lambda value: left + width * (value - low) / ((high - low) or 1.0)


def _axis(
    place: Callable[[float], float], low: float, high: float, bottom: float, title: str, middle: float
) -> list[Mark]:
    marks: list[Mark] = []
    xs = ticks(low, high, 5)
    for value in xs:
        marks.append(Line(points=((place(value), TOP), (place(value), bottom)), role="grid"))
        text = tick_text(value, xs[1] - xs[0] if len(xs) > 1 else abs(value) or 1)
        marks.append(Text(x=place(value), y=bottom + 14, text=text, role="muted", size=11, anchor="middle"))
    marks.append(Text(x=middle, y=bottom + 32, text=title, role="muted", size=11, anchor="middle"))
    return marks
