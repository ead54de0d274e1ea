"""The parts of the page: one file each, and this folder is their list.

A part is a file with `ORDER`, its place on the page, and `entries(view)`, which yields what it shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from ..collecting import Collection
from ..kinds import Measured, measured_in
from ..markup import Content, Raw, tag
from ..sections import Section
from ..svg import Drawing, inline_svg

MOST_OPEN = 3  # with more comparisons and benchmarks all are closed, and laid out when they are opened


@dataclass(frozen=True, kw_only=True)
class View:
    collection: Collection
    sections: Sequence[Section]
    measured: Sequence[Measured]
    rest: Sequence[tuple[Path, str]]  # files of no known kind, with the reason

    @property
    def opened(self) -> bool:
        return len(self.sections) + len(self.measured) <= MOST_OPEN


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A piece of the page that the list of contents names; `words` are what the filter finds it by."""

    key: str
    title: str
    html: Raw
    words: str = ""


def view_of(collection: Collection, sections: Sequence[Section]) -> View:
    measured, rest = measured_in(collection.others)
    return View(collection=collection, sections=sections, measured=measured, rest=rest)


def entries_of(view: View) -> Iterator[Entry]:
    parts = [import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__)]
    for part in sorted(parts, key=lambda part: part.ORDER):
        yield from part.entries(view)


def card(key: str, title: str, *inside: Content) -> Entry:
    html = tag("section", tag("h2", title), *inside, class_="card", id=key)
    return Entry(key=key, title=title, html=html)


def folded(
    key: str, title: str, words: str, sentence: str, *inside: Content, chip: str = "", opened: bool = False
) -> Entry:
    """A card that opens on a click; closed it lies in a template, which the browser does not lay out."""
    chips = [tag("span", chip, class_="chip")] if chip else []
    summary = tag("summary", tag("h2", title, *chips), tag("p", sentence, class_="sentence"))
    words = f"{title} {words}".lower()
    held = tag("div", *inside, class_="inside")
    about: dict[str, str | bool] = {"id": key, "class_": "card comparison", "data_words": words, "open": opened}
    html = tag("details", summary, held if opened else tag("template", held), **about)
    return Entry(key=key, title=title, html=html, words=words)


def figures(drawings: Sequence[Drawing]) -> Raw:
    shown = []
    for drawing in drawings:
        about = f" {drawing.about[:1].upper()}{drawing.about[1:]}"
        caption = tag("figcaption", tag("b", f"{drawing.title}."), about)
        shown.append(tag("figure", Raw(inline_svg(drawing)), caption, id=drawing.name))
    return tag("div", *shown, class_="figures")
