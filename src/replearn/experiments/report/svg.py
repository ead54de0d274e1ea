"""Drawings as SVG, whose marks have roles, not colours, so that one drawing is light and dark.

Inline in the page, whose style sheet has the colours, or as a file that brings its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import cycle

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"
TEXT = 13  # drawings are shown at their size or larger, so this is 13 px or more
# role: (light, dark). Series colours have a contrast of at least 4.5 to 1 on both grounds.
PALETTE: dict[str, tuple[str, str]] = {
    "ground": ("#ffffff", "#16181d"),
    "ink": ("#1c2026", "#e8eaee"),
    "muted": ("#5b6470", "#a3acb9"),
    "grid": ("#e3e6eb", "#2c313a"),
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
}
Points = Iterable[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One figure. `title` names it, `about` says in words what one sees: it is what a screen reader reads."""

    name: str  # its id on the page: letters, digits and hyphens
    title: str
    about: str
    width: float
    height: float
    marks: tuple[str, ...]


def series_roles(methods: list[str]) -> list[str]:
    """A role for each row of a comparison: the baselines keep theirs everywhere, the others take turns."""
    roles: list[str] = []
    turns = cycle(range(8))
    for method in methods:
        fixed = method in ("e2e", "removal", "repl") and method not in roles
        roles.append(method if fixed else f"series{next(turns)}")
    return roles


def line(points: Points, role: str, width: float = 1.0, dash: bool = False) -> str:
    dashes = ' stroke-dasharray="4 4"' if dash else ""
    return f'<polyline class="s-{role}" stroke-width="{_n(width)}"{dashes} points="{_places(points)}"/>'


def area(points: Points, role: str) -> str:
    return f'<polygon class="f-{role}" opacity="0.16" points="{_places(points)}"/>'


def text(x: float, y: float, words: str, role: str = "ink", anchor: str = "start", more: str = "") -> str:
    """Words at a place, with more attributes."""
    place = f'x="{_n(x)}" y="{_n(y)}" font-size="{TEXT}" text-anchor="{anchor}" {more}'
    return f'<text class="f-{role}" {place}>{escape(words)}</text>'


def disc(
    x: float, y: float, radius: float, role: str, *, opacity: float = 1.0, hollow: bool = False, tip: str = ""
) -> str:
    """A dot, or a dashed ring; the keyboard stops at one with a hint."""
    look = f'class="s-{role}" stroke-width="1.5" stroke-dasharray="3 3"' if hollow else f'class="f-{role}"'
    hint = f' data-tip="{escape(tip)}" tabindex="0" role="img" aria-label="{escape(tip)}"' if tip else ""
    return f'<circle {look} opacity="{_n(opacity)}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"{hint}/>'


def unseen(x: float, y: float, width: float, height: float, tip: str) -> str:
    """A rectangle that only has a hint."""
    place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
    return f'<rect class="f-ground" opacity="0" {place} data-tip="{escape(tip)}"/>'


def inline_svg(drawing: Drawing, head: str = "", size: str = "") -> str:
    """The drawing for the page: colours by class, hints in `data-tip`, which the page's script shows."""
    box = f'viewBox="0 0 {_n(drawing.width)} {_n(drawing.height)}"{size}'
    label = escape(f"{drawing.title}. {drawing.about}")
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="group" aria-label="{label}">'
    return f"{start}{head}{''.join(drawing.marks)}</svg>"


def standalone_svg(drawing: Drawing) -> str:
    """The drawing as a file of its own: light or dark as the viewer prefers, hints as titles."""
    light, dark = ("".join(_rules(role, tints[shade]) for role, tints in PALETTE.items()) for shade in (0, 1))
    style = f"<style>text{{font-family:{FONT}}}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
    head = f'{style}<title>{escape(drawing.title)}</title><rect class="f-ground" width="100%" height="100%"/>'
    made = inline_svg(drawing, head, f' width="{_n(drawing.width)}" height="{_n(drawing.height)}"')
    titled = re.sub(r'<(\w+)([^<>]*) data-tip="([^"]*)"([^<>]*)/>', r"<\1\2\4><title>\3</title></\1>", made)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{titled}\n'


def style_rules() -> str:
    """The palette as CSS variables, light or dark, and the classes that inline drawings use on them."""
    light, dark = ("".join(f"--{role}:{tints[shade]};" for role, tints in PALETTE.items()) for shade in (0, 1))
    return (
        f":root{{{light}}}@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}"
        + "".join(_rules(role, f"var(--{role})") for role in PALETTE)
        + "".join(f".b-{role}{{background:var(--{role})}}" for role in PALETTE)
    )


def _rules(role: str, tint: str) -> str:
    return f".f-{role}{{fill:{tint}}}.s-{role}{{stroke:{tint};fill:none}}"


def _places(points: Points) -> str:
    return " ".join(f"{_n(x)},{_n(y)}" for x, y in points)


def _n(value: float) -> str:
    """A number with at most two decimals: a thousand runs make many of them."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
