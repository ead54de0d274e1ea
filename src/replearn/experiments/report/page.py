"""The page: one HTML file with its style, script and figures inside, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from ... import __version__
from ..training.results import now
from .collecting import Collection
from .markup import Content, Raw, counted, join, tag
from .parts import Entry, entries_of, view_of
from .sections import Section
from .svg import style_rules


def page(collection: Collection, sections: Sequence[Section], *, title: str = "", live: int = 0) -> str:
    """The whole page as text; `live` is after how many seconds it asks for itself again, 0 for never."""
    title = title or f"Replacement Learning: {collection.root.resolve().name}"
    entries = list(entries_of(view_of(collection, sections)))
    empty = tag("p", "There is nothing here yet. Runs appear as soon as they have written a file.")
    shown = [*([] if collection else [empty]), *(entry.html for entry in entries)]
    body = join(
        tag("a", "Skip to the results", href="#main", class_="skip"),
        _header(collection, sections, title, live),
        tag("main", _contents(entries), *shown, id="main"),
        tag("footer", tag("p", f"Made by replearn {__version__} on {now()} from {collection.root.resolve()}.")),
        tag("div", "", id="tip", role="tooltip", hidden=True),
        Raw(f"<script>{asset('page.js')}</script>"),
    )
    head = join(
        Raw('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
        Raw('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        tag("title", title),
        Raw(f"<style>{style_rules()}{asset('page.css')}</style>"),
    )
    html = tag("html", tag("head", head), tag("body", body, data_live=str(live)), lang="en")
    return printable(f"<!doctype html>\n{html.text}")


def printable(text: str) -> str:
    """The text with what no encoding has, as half a character in a file's name, written as its number."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def asset(name: str) -> str:
    return files("replearn.experiments.report").joinpath("assets", name).read_text(encoding="utf-8")


def _header(collection: Collection, sections: Sequence[Section], title: str, live: int) -> Raw:
    running = sum(len(section.running) for section in sections) + len(collection.begun)
    facts: list[Content] = [counted(len(collection.runs), "run"), counted(len(sections), "comparison")]
    facts += [f"{running:,} in progress"] if running else []
    if collection.unread:
        facts.append(tag("a", f"{counted(len(collection.unread), 'file')} not read", href="#unread"))
    hint = "Filter by recipe, data, method"
    search = tag("input", type="search", id="filter", placeholder=hint, aria_label=hint)
    theme = tag("button", "light / dark", type="button", id="theme")
    return tag(
        "header",
        tag("h1", title),
        tag("ul", *(tag("li", fact) for fact in facts), class_="facts"),
        tag("p", f"live, every {live} s", class_="quiet", id="live", role="status") if live else "",
        tag("div", search, theme, class_="tools"),
        tag("p", "No match.", id="nothing", role="status", hidden=True),
    )


def _contents(entries: Sequence[Entry]) -> Raw:
    """Links to every entry; the filter hides those that it hides on the page."""
    if len(entries) < 2:
        return join()
    links = [
        tag("li", tag("a", entry.title, href=f"#{entry.key}"), data_words=entry.words or False)
        for entry in entries
    ]
    summary = tag("summary", tag("h2", "Contents"))
    return tag("details", summary, tag("ul", *links), class_="card contents", id="contents")
