"""What every chart shares: a frame from values to places, round ticks, a grid and legends.

Charts are WIDTH units wide and a phone shows them at that many pixels or more, so text is never below 12 px.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .svg import disc, line, text

WIDTH, HEIGHT = 340.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 12.0, 14.0, 46.0
LETTER, LINE = 7.1, 19.0  # the width of a letter and the height of a line of text
Sign = tuple[str, str, str]  # of a legend: a role, its text, and how it is drawn: dot, line or dash


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The plotting area: the values at its edges, and its edges on the paper."""

    x0: float
    x1: float
    y0: float = 0.0
    y1: float = 1.0
    left: float = LEFT
    top: float = TOP
    width: float = WIDTH
    bottom: float = HEIGHT - BOTTOM

    @property
    def right(self) -> float:
        return self.width - RIGHT

    def x(self, value: float) -> float:
        inside = min(max(value, self.x0), self.x1)
        return self.left + (self.right - self.left) * (inside - self.x0) / ((self.x1 - self.x0) or 1.0)

    def y(self, value: float) -> float:
        inside = min(max(value, self.y0), self.y1)
        return self.top + (self.bottom - self.top) * (self.y1 - inside) / ((self.y1 - self.y0) or 1.0)

    def at(self, x: float, y: float) -> tuple[float, float]:
        return self.x(x), self.y(y)


def padded(values: Sequence[float], share: float = 0.12, least: float = 0.1) -> tuple[float, float]:
    """The range of some values, with room around it; a single value gets `least` on both sides."""
    low, high = min(values), max(values)
    room = max(share * (high - low), least)
    return low - room, high + room


def ticks(low: float, high: float, most: int = 5) -> list[tuple[float, str]]:
    """Round numbers between low and high with their texts, at most about `most` of them.

    >>> ticks(0, 10)
    [(0.0, '0'), (2.0, '2'), (4.0, '4'), (6.0, '6'), (8.0, '8'), (10.0, '10')]
    """
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [(low, f"{low:g}")]
    step = 10.0 ** math.floor(math.log10(span / most))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if span / (factor * step) <= most)
    digits = min(6, max(0, -math.floor(math.log10(step) + 1e-9)))
    first = math.ceil(low / step - 1e-9)
    values = [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]
    return [(value, f"{value:,.{digits}f}") for value in values]


def x_axis(frame: Frame, title: str, *, whole: bool = False) -> list[str]:
    """Ticks with grid lines, and a title below; `whole` keeps fractions off the axis (epochs)."""
    marks: list[str] = []
    for value, shown in ticks(frame.x0, frame.x1, 4):
        if not whole or value == int(value):
            x = frame.x(value)
            marks.append(line([(x, frame.top), (x, frame.bottom)], "grid"))
            marks.append(text(x, frame.bottom + 17, f"{value:.0f}" if whole else shown, "muted", "middle"))
    middle = frame.left + (frame.right - frame.left) / 2 if len(title) < 36 else frame.width / 2
    return [*marks, text(middle, frame.bottom + 37, title, "muted", "middle")]


def y_axis(frame: Frame, title: str) -> list[str]:
    marks: list[str] = []
    for value, shown in ticks(frame.y0, frame.y1):
        y = frame.y(value)
        marks.append(line([(frame.left, y), (frame.right, y)], "grid"))
        marks.append(text(frame.left - 6, y + 4, shown, "muted", "end"))
    middle = (frame.top + frame.bottom) / 2
    return [*marks, text(12, middle, title, "muted", "middle", f'transform="rotate(-90 12 {middle:g})"')]


def legend(entries: Sequence[Sign], left: float, top: float, right: float = WIDTH) -> tuple[list[str], float]:
    """The signs in as many lines as they need, and where they end."""
    marks: list[str] = []
    x, y = left, top + 13
    for role, words, sign in entries:
        need = 32 + LETTER * len(words)
        if x > left and x + need > right:
            x, y = left, y + LINE
        if sign == "dot":
            marks.append(disc(x + 6, y - 4.5, 5, role))
        else:
            marks.append(line([(x, y - 4.5), (x + 14, y - 4.5)], role, 2.5, sign == "dash"))
        marks.append(text(x + 19, y, words))
        x += need
    return marks, y + 8 if entries else top
