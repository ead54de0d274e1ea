"""A dot plot: a line for each case, a dot for each candidate, and a rule at the value of what was before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .axes import RIGHT, WIDTH, padded, tick_text, ticks
from .scene import Disc, Drawing, Line, Mark, Text

ROW, TOP, LETTER = 17.0, 8.0, 6.1
MOST_LETTERS, MOST_IN_HEADING = 36, 56


@dataclass(frozen=True, kw_only=True)
class Dot:
    """One value, with its quartiles where they are known; hollow for what is not ours, or not yet healed."""

    value: float
    role: str
    tip: str
    low: float | None = None
    high: float | None = None
    hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the plot; without dots it is a heading."""

    label: str
    dots: tuple[Dot, ...] = ()


def dot_figure(
    cases: Sequence[Case],
    *,
    name: str,
    title: str,
    about: str,
    x_title: str,
    legend: Sequence[tuple[str, str, bool]],
    rule: tuple[float, str] | None = None,
) -> Drawing:
    """Draw the cases from top to bottom; `legend` names roles, `rule` is a value and what it stands for."""
    values = [dot.value for case in cases for dot in case.dots]
    low, high = padded([*values, *([rule[0]] if rule else [])], 0.06, 0.01)
    longest = max((len(case.label) for case in cases if case.dots), default=0)
    left = 16 + LETTER * min(max(longest, 10), MOST_LETTERS)
    inner = WIDTH - left - RIGHT
    bottom = TOP + ROW * len(cases) + 4

    def place(value: float) -> float:
        return left + inner * (min(max(value, low), high) - low) / ((high - low) or 1.0)

    marks = _axis(low, high, place, bottom)
    marks.append(Text(x=(left + WIDTH - RIGHT) / 2, y=bottom + 30, text=x_title, role="muted", anchor="middle"))
    if rule:
        x = place(rule[0])
        marks.append(Line(points=((x, TOP), (x, bottom)), role="e2e", width=1.4, dash=True))
    for number, case in enumerate(cases):
        y = TOP + ROW * (number + 0.5) + 2
        if not case.dots:
            label = shortened(case.label, MOST_IN_HEADING)
            marks.append(Text(x=2, y=y + 4, text=label, size=11, bold=True))
            continue
        label = shortened(case.label, MOST_LETTERS)
        marks.append(Text(x=left - 8, y=y + 4, text=label, role="muted", size=11, anchor="end"))
        for dot in sorted(case.dots, key=lambda dot: not dot.hollow):
            if dot.low is not None and dot.high is not None and dot.high > dot.low:
                ends = ((place(dot.low), y), (place(dot.high), y))
                marks.append(Line(points=ends, role=dot.role, width=1.6))
            radius = 5.0 if dot.hollow else 4.2
            marks.append(
                Disc(x=place(dot.value), y=y, radius=radius, role=dot.role, hollow=dot.hollow, tip=dot.tip)
            )
    height = bottom + 40
    marks += _legend([*legend, *([("e2e", rule[1], True)] if rule else [])], height + 8, bool(rule))
    return Drawing(name=name, title=title, about=about, width=WIDTH, height=height + 16, marks=tuple(marks))


def shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _axis(low: float, high: float, place: Callable[[float], float], bottom: float) -> list[Mark]:
    marks: list[Mark] = []
    xs = ticks(low, high, 5)
    for value in xs:
        x = place(value)
        marks.append(Line(points=((x, TOP), (x, bottom)), role="grid"))
        text = tick_text(value, xs[1] - xs[0] if len(xs) > 1 else abs(value) or 1)
        marks.append(Text(x=x, y=bottom + 14, text=text, role="muted", size=11, anchor="middle"))
    return marks


def _legend(entries: Sequence[tuple[str, str, bool]], y: float, ruled: bool) -> list[Mark]:
    marks: list[Mark] = []
    x = 8.0
    for number, (role, text, hollow) in enumerate(entries):
        if ruled and number == len(entries) - 1:
            marks.append(Line(points=((x - 5, y - 4), (x + 7, y - 4)), role=role, width=1.4, dash=True))
        else:
            marks.append(Disc(x=x, y=y - 4, radius=5.0 if hollow else 4.2, role=role, hollow=hollow))
        marks.append(Text(x=x + 11, y=y, text=text, size=11))
        x += 30 + 6.1 * len(text)
    return marks
