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


def _svg(drawing: Drawing, head: str, tips: bool) -> str:
    width, height = _n(drawing.width), _n(drawing.height)
    size = f'viewBox="0 0 {width} {height}"' + ("" if tips else f' width="{width}" height="{height}"')
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
    faint = f' opacity="{_n(mark.opacity)}"' if mark.opacity != 1 else ""
    if isinstance(mark, Disc):
        tag, focus, hollow = "circle", True, mark.hollow
        place = f'cx="{_n(mark.x)}" cy="{_n(mark.y)}" r="{_n(mark.radius)}"'
    else:
        tag, focus, hollow = "rect", False, False
        place = f'x="{_n(mark.x)}" y="{_n(mark.y)}" width="{_n(mark.width)}" height="{_n(mark.height)}" rx="2"'
    edge, dash = (' stroke-width="1.5"', ' stroke-dasharray="3 3"') if hollow else ("", "")
    start = f'<{tag} class="{"s" if hollow else "f"}-{mark.role}"{faint}{edge} {place}{dash}'
    if not mark.tip:
        return f"{start}/>"
    tip = escape(mark.tip, quote=tips)
    if not tips:
        return f"{start}><title>{tip}</title></{tag}>"
    stop = f' tabindex="0" role="img" aria-label="{tip}"' if focus else ""
    return f'{start} data-tip="{tip}"{stop}/>'


def _n(value: float) -> str:
    """A number with at most two decimals: a thousand runs make many of them."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
