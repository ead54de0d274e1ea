"""A drawing as plain data: marks have roles, not colours, so one drawing is light and dark."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Literal, TypeAlias

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, kw_only=True)
class Line:
    points: Points
    role: str
    width: float = 1.0
    dash: bool = False
    band: bool = False  # the points enclose an area, which is filled faintly


@dataclass(frozen=True)
class Disc:
    x: float
    y: float
    radius: float
    role: str
    opacity: float = 1.0
    hollow: bool = False
    tip: str = ""


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    role: str
    opacity: float = 1.0
    tip: str = ""


@dataclass(frozen=True, kw_only=True)
class Text:
    x: float
    y: float
    text: str
    role: str = "ink"
    size: float = 13.0  # drawings are shown at their size or larger, so this is 13 px or more
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False
    upright: bool = False  # turned by 90 degrees, for the vertical axis


Mark: TypeAlias = Line | Disc | Box | Text


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One figure. `title` names it, `about` says in words what one sees: it is what a screen reader reads."""

    name: str  # for the file beside the page: letters, digits and hyphens
    title: str
    about: str
    width: float
    height: float
    marks: tuple[Mark, ...]


# role: (light, dark). Series colours have a contrast of at least 4.5 to 1 on both grounds.
PALETTE: dict[str, tuple[str, str]] = {
    "ground": ("#ffffff", "#16181d"),
    "ink": ("#1c2026", "#e8eaee"),
    "muted": ("#5b6470", "#a3acb9"),
    "grid": ("#e3e6eb", "#2c313a"),
    "kept": ("#d3d9e2", "#3a414d"),
    "e2e": ("#4b5563", "#b6bfcc"),
    "removal": ("#0b6b80", "#54c6dd"),
    "repl": ("#b4460a", "#ff9a57"),
    "series0": ("#1f5fa8", "#7db4f2"),
    "series1": ("#15753c", "#5fce8b"),
    "series2": ("#7433c9", "#bf9bf7"),
    "series3": ("#b3125b", "#fb87b7"),
    "series4": ("#8a4b2a", "#d9a07c"),
    "series5": ("#7a5c00", "#d9bb4d"),
    "series6": ("#a11d1d", "#f78d8d"),
    "series7": ("#3f4fb5", "#9aa8ff"),
    "paper": ("#5b6470", "#a3acb9"),
}


def series_roles(methods: list[str]) -> list[str]:
    """A role for each row of a comparison: the baselines keep theirs everywhere, the others take turns."""
    roles: list[str] = []
    turns = cycle(range(8))
    for method in methods:
        fixed = method in ("e2e", "removal", "repl") and method not in roles
        roles.append(method if fixed else f"series{next(turns)}")
    return roles
