"""What every chart shares: a frame from values to places, round ticks, a grid and legends; and the dot plot.

Charts are WIDTH units wide and a phone shows them at that many pixels or more, so text is never below 12 px.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .scene import Box, Disc, Drawing, Line, Mark, Text

WIDTH, HEIGHT = 340.0, 280.0
LEFT, RIGHT, TOP, BOTTOM = 54.0, 12.0, 14.0, 46.0
LETTER, LINE = 7.1, 19.0  # the width of a letter and the height of a line of text
BESIDE = 13  # of a dot plot: longer names stand on a line of their own, above their dots
T = TypeVar("T")


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


def x_axis(frame: Frame, title: str, *, whole: bool = False) -> list[Mark]:
    """Ticks with grid lines, and a title below; `whole` keeps fractions off the axis (epochs)."""
    marks: list[Mark] = []
    for value, text in ticks(frame.x0, frame.x1, 4):
        if not whole or value == int(value):
            x = frame.x(value)
            marks.append(Line(points=((x, frame.top), (x, frame.bottom)), role="grid"))
            shown = f"{value:.0f}" if whole else text
            marks.append(Text(x=x, y=frame.bottom + 17, text=shown, role="muted", anchor="middle"))
    middle = frame.left + (frame.right - frame.left) / 2 if len(title) < 36 else frame.width / 2
    return [*marks, Text(x=middle, y=frame.bottom + 37, text=title, role="muted", anchor="middle")]


def y_axis(frame: Frame, title: str) -> list[Mark]:
    marks: list[Mark] = []
    for value, text in ticks(frame.y0, frame.y1):
        y = frame.y(value)
        marks.append(Line(points=((frame.left, y), (frame.right, y)), role="grid"))
        marks.append(Text(x=frame.left - 6, y=y + 4, text=text, role="muted", anchor="end"))
    middle = (frame.top + frame.bottom) / 2
    return [*marks, Text(x=12, y=middle, text=title, role="muted", anchor="middle", upright=True)]


def legend(
    entries: Sequence[tuple[str, str, str]], left: float, top: float, right: float = WIDTH
) -> tuple[list[Mark], float]:
    """Roles, texts and signs (dot, ring, line, dash, box) in as many lines as they need, and where they end."""
    marks: list[Mark] = []
    x, y = left, top + 13
    for role, text, sign in entries:
        need = 32 + LETTER * len(text)
        if x > left and x + need > right:
            x, y = left, y + LINE
        if sign in ("dot", "ring"):
            marks.append(Disc(x=x + 6, y=y - 4.5, radius=5, role=role, hollow=sign == "ring"))
        elif sign == "box":
            marks.append(Box(x=x, y=y - 10, width=11, height=11, role=role))
        else:
            marks.append(Line(points=((x, y - 4.5), (x + 14, y - 4.5)), role=role, width=2.5, dash=sign == "dash"))
        marks.append(Text(x=x + 19, y=y, text=text))
        x += need
    return marks, y + 8 if entries else top


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One value, with its quartiles where they are known; hollow for what is not ours, or not yet healed."""

    value: float
    role: str
    tip: str
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    faint: bool = False  # one of several that another dot is the mean of

    @classmethod
    def of(cls, ratio: Mapping[str, float], role: str, tip: str) -> Dot:
        """A median with its quartiles."""
        value, low, high = ratio["median"], ratio["low"], ratio["high"]
        tip += f"\n{value:.3f} ({low:.3f} to {high:.3f})"
        return cls(value=value, low=low, high=high, role=role, tip=tip)

    @classmethod
    def printed(cls, value: float, role: str, tip: str) -> Dot:
        """A number of the paper."""
        return cls(value=value, role=role, tip=f"{tip}\n{value:.3f}", hollow=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the plot; without dots it is a heading."""

    label: str
    dots: tuple[Dot, ...] = ()


def grouped(rows: Iterable[T], group: Callable[[T], str], case: Callable[[T], Case]) -> list[Case]:
    """A heading for each group, and below it the cases of its rows."""
    groups: dict[str, list[Case]] = {}
    for row in rows:
        groups.setdefault(group(row), []).append(case(row))
    return [entry for name, cases in groups.items() for entry in (Case(label=name), *cases)]


def dot_figure(
    cases: Sequence[Case],
    *,
    name: str,
    title: str,
    about: str,
    x_title: str,
    legend_of: Sequence[tuple[str, str, str]] = (),
    rule: tuple[float, str] | None = None,
    width: float = WIDTH,
) -> Drawing:
    """Draw the cases from top to bottom; `legend_of` names roles, `rule` is a value and what it stands for."""
    values = [dot.value for case in cases for dot in case.dots]
    low, high = padded([*values, *([rule[0]] if rule else [])] or [0.0], 0.06, 0.01)
    longest = max((len(case.label) for case in cases if case.dots), default=0)
    own_line = longest > BESIDE
    rows = [1 if not case.dots else 1.9 if own_line else 1.1 for case in cases]
    left = 10.0 if own_line else 16 + LETTER * longest
    bottom = 8 + LINE * sum(rows) + 6
    frame = Frame(x0=low, x1=high, left=left, top=8, bottom=bottom, width=width)
    marks = x_axis(frame, x_title)
    if rule:
        x = frame.x(rule[0])
        marks.append(Line(points=((x, frame.top), (x, bottom)), role="e2e", width=1.6, dash=True))
    most = int(width / LETTER) - 1
    y = frame.top
    for case, height in zip(cases, rows, strict=True):
        text = shortened(case.label, most)
        if not case.dots:
            marks.append(Text(x=2, y=y + 14, text=text, bold=True))
        elif own_line:
            marks += [Text(x=8, y=y + 14, text=text, role="muted"), *_dots(frame, case, y + 1.45 * LINE)]
        else:
            marks.append(Text(x=left - 8, y=y + 14, text=text, role="muted", anchor="end"))
            marks += _dots(frame, case, y + 0.5 * LINE)
        y += LINE * height
    entries = [*legend_of, *([("e2e", rule[1], "dash")] if rule else [])]
    made, end = legend(entries, 8, bottom + 44, width)
    return Drawing(name=name, title=title, about=about, width=width, height=end, marks=(*marks, *made))


def _dots(frame: Frame, case: Case, y: float) -> list[Mark]:
    marks: list[Mark] = []
    for dot in sorted(case.dots, key=lambda dot: not (dot.hollow or dot.faint)):
        if dot.low is not None and dot.high is not None and dot.high > dot.low:
            ends = ((frame.x(dot.low), y), (frame.x(dot.high), y))
            marks.append(Line(points=ends, role=dot.role, width=1.8))
        radius, opacity = (4, 0.35) if dot.faint else (5, 1.0)
        place = (frame.x(dot.value), y, radius)
        marks.append(Disc(*place, dot.role, opacity=opacity, hollow=dot.hollow, tip=dot.tip))
    return marks
