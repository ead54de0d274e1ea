"""A benchmark's file as a card of the page: what it comes to, its figures and tables, and how it was made."""

from __future__ import annotations

from .markup import Raw, fold, join, table, tag
from .measured import Measured, Table
from .scene import Drawing
from .svg import inline_svg
from .tables import command

MOST_ROWS = 24  # a longer table is folded


def measured_card(measured: Measured, open_: bool) -> Raw:
    """A fold like those of the comparisons: the filter finds it, and a closed one is laid out when opened."""
    found = measured.found
    summary = join(tag("h2", found.title), tag("p", found.sentence, class_="sentence"))
    parts = [tag("p", found.about, class_="quiet")] if found.about else []
    parts.append(tag("div", *(figure(drawing) for drawing in found.figures), class_="figures"))
    parts += [_table(shown, found.title) for shown in found.tables]
    if measured.command:
        parts.append(tag("p", command(measured.command)))
    parts.append(tag("p", f"Measured on {measured.made_on}. File: {measured.path.as_posix()}", class_="quiet"))
    inside = tag("div", *parts, class_="inside")
    words = f"{found.title} {measured.path.as_posix()}".lower()
    attributes: dict[str, str | bool] = {"id": measured.key, "class_": "card comparison", "data_words": words}
    held = inside if open_ else tag("template", inside)
    return tag("details", tag("summary", summary), held, open=open_, **attributes)


def _table(shown: Table, label: str) -> Raw:
    made = table(shown.heads, shown.rows, shown.left, shown.title or label)
    title = shown.title
    if len(shown.rows) > MOST_ROWS or shown.folded:
        return fold(f"{title or 'Every number'} ({len(shown.rows)} rows)", made)
    return join(tag("h3", title), made) if title else made


def figure(drawing: Drawing) -> Raw:
    caption = join(tag("b", f"{drawing.title}."), " ", drawing.about[:1].upper() + drawing.about[1:])
    return tag("figure", Raw(inline_svg(drawing)), tag("figcaption", caption), id=drawing.name)
