"""A drawing as SVG: inline for the page, whose style sheet has the colours, or as a file that brings its own."""

from __future__ import annotations

from html import escape

from .scene import PALETTE, Disc, Drawing, Line, Mark, Text

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"


def inline_svg(drawing: Drawing) -> str:
    """The drawing for the page: colours by class, hints in `data-tip`, which the page's script shows."""
    return _svg(drawing, "", tips=True)


def standalone_svg(drawing: Drawing) -> str:
    """The drawing as a file of its own: light or dark as the viewer prefers, hints as titles."""
    light, dark = ("".join(_rules(role, tints[shade]) for role, tints in PALETTE.items()) for shade in (0, 1))
    style = f"<style>text{{font-family:{FONT}}}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>"
    head = f'{style}<title>{escape(drawing.title)}</title><rect class="f-ground" width="100%" height="100%"/>'
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + _svg(drawing, head, tips=False) + "\n"


def style_rules() -> str:
    """The classes that inline drawings use, on the page's colour variables."""
    return "".join(_rules(role, f"var(--{role})") for role in PALETTE)


def variables(shade: int) -> str:
    """The palette as CSS variables: 0 is light, 1 is dark."""
    return "".join(f"--{role}:{tints[shade]};" for role, tints in PALETTE.items())


def _rules(role: str, tint: str) -> str:
    return f".f-{role}{{fill:{tint}}}.s-{role}{{stroke:{tint};fill:none}}"


def _svg(drawing: Drawing, head: str, tips: bool) -> str:
    size = f'viewBox="0 0 {_n(drawing.width)} {_n(drawing.height)}"'
    if not tips:
        size += f' width="{_n(drawing.width)}" height="{_n(drawing.height)}"'
    label = escape(f"{drawing.title}. {drawing.about}", quote=True)
    body = "".join(_mark(mark, tips) for mark in drawing.marks)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="group" aria-label="{label}">{head}{body}</svg>'


def _mark(mark: Mark, tips: bool) -> str:
    if isinstance(mark, Line):
        dash = ' stroke-dasharray="4 4"' if mark.dash else ""
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in mark.points)
        if mark.band:
            return f'<polygon class="f-{mark.role}" opacity="0.16" points="{points}"/>'
        return f'<polyline class="s-{mark.role}" stroke-width="{_n(mark.width)}"{dash} points="{points}"/>'
    if isinstance(mark, Text):
        turn = f' transform="rotate(-90 {_n(mark.x)} {_n(mark.y)})"' if mark.upright else ""
        weight = ' font-weight="600"' if mark.bold else ""
        return (
            f'<text class="f-{mark.role}" x="{_n(mark.x)}" y="{_n(mark.y)}" font-size="{_n(mark.size)}" '
            f'text-anchor="{mark.anchor}"{weight}{turn}>{escape(mark.text)}</text>'
        )
    if isinstance(mark, Disc):
        paint = _paint(mark.role, mark.hollow, mark.opacity)
        dash = ' stroke-dasharray="3 3"' if mark.hollow else ""
        place = f'cx="{_n(mark.x)}" cy="{_n(mark.y)}" r="{_n(mark.radius)}"'
        return _hinted(f"<circle {paint} {place}{dash}", mark.tip, bool(mark.tip), tips, "circle")
    paint = _paint(mark.role, mark.hollow, mark.opacity)
    place = f'x="{_n(mark.x)}" y="{_n(mark.y)}" width="{_n(mark.width)}" height="{_n(mark.height)}" rx="2"'
    return _hinted(f"<rect {paint} {place}", mark.tip, mark.focus, tips, "rect")


def _paint(role: str, hollow: bool, opacity: float) -> str:
    faint = f' opacity="{_n(opacity)}"' if opacity != 1 else ""
    return f'class="{"s" if hollow else "f"}-{role}"{faint}' + (' stroke-width="1.5"' if hollow else "")


def _hinted(start: str, tip: str, focus: bool, tips: bool, tag: str) -> str:
    if not tip:
        return f"{start}/>"
    if not tips:
        return f"{start}><title>{escape(tip)}</title></{tag}>"
    stop = ' tabindex="0" role="img" aria-label="' + escape(tip, quote=True) + '"' if focus else ""
    return f'{start} data-tip="{escape(tip, quote=True)}"{stop}/>'


def _n(value: float) -> str:
    """A number with at most two decimals: a thousand runs make many of them."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
