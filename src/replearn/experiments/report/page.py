"""The door `build_report`: a folder of results in, a page out.

The page is one HTML file with its style, script and figures inside, which needs no network.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ... import __version__
from ...errors import ReplearnError
from ..training.results import now, write_atomically
from . import benchmarks, claims, comparisons
from .collecting import Collection, collect
from .comparisons import minute
from .markup import Content, Entry, Raw, card, counted, join, table, tag
from .sections import Section, sections_of
from .svg import style_rules

MOST = 200  # files in a list
MOST_OPEN = 3  # with more comparisons all are closed, and laid out when they are opened


@dataclass(frozen=True, kw_only=True)
class Report:
    page: Path
    collection: Collection
    sections: tuple[Section, ...]


def build_report(folder: str | os.PathLike[str], out: str | os.PathLike[str], *, title: str = "") -> Report:
    """Write one self-contained HTML page.

    ReplearnError for a folder without results, or where nothing can be written.
    """
    out = Path(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise ReplearnError(f"The report is one HTML file: write a name such as {out / 'report.html'}, not {out}.")
    collection = collect(folder)
    sections = sections_of(collection)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page(collection, sections, title=title))
    except OSError as error:
        raise ReplearnError(f"Can't write {out}: {error}.") from error
    return Report(page=out, collection=collection, sections=tuple(sections))


def page(collection: Collection, sections: Sequence[Section], *, title: str = "", live: int = 0) -> str:
    """The whole page as text; `live` is after how many seconds it asks for itself again, 0 for never."""
    title = title or f"Replacement Learning: {collection.root.resolve().name}"
    measured, rest = benchmarks.measured_in(collection.others)
    opened = len(sections) <= MOST_OPEN
    entries = [
        *comparisons.summary(sections),
        *claims.entries(sections, measured),
        *comparisons.entries(sections, opened),
        *benchmarks.entries(measured),
        *_files(collection, rest),
    ]
    empty = tag("p", "There is nothing here yet. Runs appear after their first epoch.")
    shown = [*([] if collection else [empty]), *(entry.html for entry in entries)]
    body = join(
        tag("a", "Skip to the results", href="#main", class_="skip"),
        _header(collection, sections, title, live),
        tag("main", _contents(entries), *shown, id="main"),
        tag("footer", f"Made by replearn {__version__}, {minute(now())} UTC, from {collection.root.resolve()}."),
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
    running = sum(len(section.running) for section in sections)
    counts = {"run": len(collection.runs), "comparison": len(sections), "other file": len(collection.others)}
    facts: list[Content] = [counted(count, thing) for thing, count in counts.items() if count]
    facts += [f"{running:,} in progress"] if running else []
    if collection.unread:
        facts.append(tag("a", f"{counted(len(collection.unread), 'file')} not read", href="#unread"))
    hint = "Filter by name or method"
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


def _files(collection: Collection, rest: Sequence[tuple[Path, str]]) -> Iterator[Entry]:
    """Files that are not shown, with the reason."""
    unread = [*((entry.path, entry.reason) for entry in collection.unread), *rest]
    if unread:
        why: dict[str, list[str]] = defaultdict(list)
        for path, reason in unread[:MOST]:
            why[reason].append(path.as_posix())
        rows = [(reason, ", ".join(paths)) for reason, paths in why.items()]
        yield card("unread", "Files not read", table(("why", "files"), rows, "files not read"))


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
