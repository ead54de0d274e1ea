"""Axes: from values to places on the paper, with round ticks, a grid and titles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .scene import Line, Mark, Text

WIDTH, HEIGHT = 390.0, 290.0
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 16.0, 44.0


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The plotting area: the values at its edges, and its edges on the paper."""

    x0: float
    x1: float
    y0: float
    y1: float
    width: float = WIDTH
    height: float = HEIGHT

    def x(self, value: float) -> float:
        inner = self.width - LEFT - RIGHT
        return LEFT + inner * (value - self.x0) / ((self.x1 - self.x0) or 1.0)

    def y(self, value: float) -> float:
        inner = self.height - TOP - BOTTOM
        return TOP + inner * (self.y1 - value) / ((self.y1 - self.y0) or 1.0)


def padded(values: Sequence[float], share: float = 0.12, least: float = 0.1) -> tuple[float, float]:
    """The range of some values, with room around it; a single value gets `least` on both sides."""
    low, high = min(values), max(values)
    room = max(share * (high - low), least)
    return low - room, high + room


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between low and high, at most about `most` of them.

    >>> ticks(0, 10)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if span / (factor * step) <= most)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first
    return [round((first + index) * step, 12) for index in range(count + 1)]


def tick_text(value: float, step: float) -> str:
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 2
    return f"{value:,.{min(digits, 6)}f}"


def draw_axes(frame: Frame, x_title: str, y_title: str, whole_x: bool = False) -> list[Mark]:
    """Grid lines, ticks and titles; `whole_x` keeps fractions off the horizontal axis (epochs)."""
    marks: list[Mark] = []
    bottom, right = frame.y(frame.y0), frame.x(frame.x1)
    ys = ticks(frame.y0, frame.y1)
    for value in ys:
        y = frame.y(value)
        marks.append(Line(points=((LEFT, y), (right, y)), role="grid"))
        text = tick_text(value, ys[1] - ys[0] if len(ys) > 1 else abs(value) or 1)
        marks.append(Text(x=LEFT - 6, y=y + 4, text=text, role="muted", size=11, anchor="end"))
    xs = [value for value in ticks(frame.x0, frame.x1) if not whole_x or value == int(value)]
    for value in xs:
        x = frame.x(value)
        marks.append(Line(points=((x, bottom), (x, bottom + 4)), role="muted"))
        text = tick_text(value, xs[1] - xs[0] if len(xs) > 1 else abs(value) or 1)
        marks.append(Text(x=x, y=bottom + 16, text=text, role="muted", size=11, anchor="middle"))
    marks.append(Line(points=((LEFT, bottom), (right, bottom)), role="muted"))
    middle = (TOP + bottom) / 2
    marks.append(Text(x=12, y=middle, text=y_title, role="muted", size=12, anchor="middle", upright=True))
    marks.append(
        Text(x=(LEFT + right) / 2, y=frame.height - 8, text=x_title, role="muted", size=12, anchor="middle")
    )
    return marks


def beside(frame: Frame, x: float, y: float, away: float, label: str, role: str) -> Text:
    """A label to the right of a point, or to its left where the frame ends."""
    need = away + 6.2 * len(label)
    if x + need < frame.width - RIGHT or x - need < LEFT:
        return Text(x=x + away, y=y, text=label, role=role, size=11)
    return Text(x=x - away, y=y, text=label, role=role, size=11, anchor="end")


def spread_labels(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights for labels that would like to stand at `wanted`, moved apart by at least `gap`."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [0.0] * len(wanted)
    last = low - gap
    for index in order:
        placed[index] = last = max(wanted[index], last + gap)
    limit = high
    for index in reversed(order):
        placed[index] = limit = min(placed[index], limit)
        limit -= gap
    return placed
