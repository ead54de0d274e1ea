"""A dot plot: a line for each case, a dot for each candidate, and a rule at the value of what was before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .chart import LETTER, LINE, WIDTH, Frame, legend, padded, shortened, x_axis
from .scene import Disc, Drawing, Line, Mark, Text

BESIDE = 13  # longer names stand on a line of their own, above their dots
T = TypeVar("T")


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
        return cls(value=ratio["median"], low=ratio["low"], high=ratio["high"], role=role, tip=tip)


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
