"""A drawing as a figure of the page, with its caption."""

from __future__ import annotations

from .markup import Raw, join, tag
from .scene import Drawing
from .svg import inline_svg


def figure(drawing: Drawing) -> Raw:
    caption = join(tag("b", f"{drawing.title}."), " ", drawing.about[:1].upper() + drawing.about[1:])
    return tag("figure", Raw(inline_svg(drawing)), tag("figcaption", caption), id=drawing.name)
