"""The page: one HTML file with its style, script and figures inside, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from ... import __version__
from ..training.results import now
from .collecting import Collection
from .examples import as_address
from .kinds import measured_in
from .markup import Content, Raw, counted, fold, join, table, tag
from .measured import Measured, Table
from .paper_part import paper_part
from .scene import PALETTE, Drawing
from .sections import Section
from .svg import inline_svg, style_rules, variables
from .tables import command, cost_table, reached_table, reproduce_list, runs_table, sentence

OPEN_SECTIONS = 4  # the others are parsed when they are opened: a thousand runs must stay usable
MOST_UNREAD = 200


def page(collection: Collection, sections: Sequence[Section], *, title: str = "", live: int = 0) -> str:
    """The whole page as text; `live` is after how many seconds it asks for itself again, 0 for never."""
    title = title or f"Replacement Learning: {collection.root.resolve().name}"
    body = join(
        tag("a", "Skip to the results", href="#main", class_="skip"),
        _header(collection, sections, title, live),
        tag("main", *_main(collection, sections), id="main"),
        tag("footer", tag("p", f"Made by replearn {__version__} on {now()} from {collection.root.resolve()}.")),
        tag("div", "", id="tip", role="tooltip", hidden=True),
        Raw(f"<script>{asset('page.js')}</script>"),
    )
    head = join(
        Raw('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
        Raw('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        tag("title", title),
        Raw(f"<style>{style()}</style>"),
    )
    return (
        "<!doctype html>\n"
        + tag("html", tag("head", head), tag("body", body, data_live=str(live)), lang="en").text
    )


def style() -> str:
    """The style sheet: the palette as variables, by the viewer's preference or by the button on the page."""
    dark = variables(1)
    return (
        f":root{{{variables(0)}}}@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}"
        f":root[data-theme=dark]{{{dark}}}{style_rules()}"
        + "".join(f".b-{role}{{background:var(--{role})}}" for role in PALETTE)
        + asset("page.css")
    )


def asset(name: str) -> str:
    return files("replearn.experiments.report").joinpath("assets", name).read_text(encoding="utf-8")


def _header(collection: Collection, sections: Sequence[Section], title: str, live: int) -> Raw:
    running = sum(len(section.running) for section in sections) + len(collection.begun)
    facts: list[Content] = [
        tag("li", tag("b", f"{len(collection.runs):,}"), " run" if len(collection.runs) == 1 else " runs"),
        tag("li", tag("b", f"{len(sections):,}"), " comparison" if len(sections) == 1 else " comparisons"),
    ]
    if running:
        facts.append(tag("li", tag("b", f"{running:,}"), " in progress"))
    if collection.unread:
        facts.append(tag("li", tag("a", f"{counted(len(collection.unread), 'file')} not read", href="#unread")))
    buttons: list[Content] = [
        tag(
            "input", type="search", id="filter", placeholder="Filter by recipe, data, method", aria_label="Filter"
        ),
        tag("button", "light / dark", type="button", id="theme"),
    ]
    watching = [tag("p", f"live, every {live} s", class_="quiet", id="live", role="status")] if live else []
    return tag(
        "header",
        tag("h1", title),
        tag("ul", *facts, class_="facts"),
        *watching,
        tag("div", *buttons, class_="tools"),
    )


def _main(collection: Collection, sections: Sequence[Section]) -> list[Raw]:
    parts: list[Raw] = []
    if not collection:
        parts.append(tag("p", "There is nothing here yet. Runs appear as soon as they have written a file."))
    if collection.begun:
        names = [tag("li", tag("code", path.as_posix())) for path in collection.begun[:100]]
        parts.append(tag("section", tag("h2", "Just begun"), tag("ul", *names), class_="card"))
    for number, section in enumerate(sections):
        parts.append(_section(section, number < OPEN_SECTIONS))
    measured, rest = measured_in(collection.others)
    if sections:
        legend = (
            "Numbers are those of the last epoch, mean ± standard deviation over seeds. Differences are taken "
        )
        legend += "seed by seed; in brackets the 95 % interval of their mean. Undecided: the interval contains 0."
        parts.append(tag("p", legend, class_="quiet legend"))
    parts += [measured_card(entry, number < OPEN_SECTIONS) for number, entry in enumerate(measured)]
    if sections or measured:
        note = "As the paper prints them. Rows of ours that carry the same numbers stand beside them."
        part = (
            tag("h2", "The tables of the paper"),
            tag("p", note, class_="quiet"),
            paper_part(sections, measured),
        )
        parts.append(tag("section", *part, class_="card", id="paper"))
    unread = [*((entry.path, entry.reason) for entry in collection.unread), *rest]
    if unread:
        rows = [(path.as_posix(), reason) for path, reason in unread[:MOST_UNREAD]]
        shown = table(("file", "why"), rows, (0, 1), "files not read")
        parts.append(tag("section", tag("h2", "Files not read"), shown, class_="card", id="unread"))
    return parts


def _section(section: Section, open_: bool) -> Raw:
    """A fold for each comparison; a closed one lies in a template, which the browser does not lay out."""
    running = [tag("span", f"{len(section.running)} in progress", class_="chip")] if section.running else []
    summary = join(
        tag("h2", f"{section.recipe} on {section.data}", *running),
        tag("p", sentence(section), class_="sentence"),
    )
    labels = " ".join(dict.fromkeys(str(run.result.variant["label"]) for run in section.runs))
    words = f"{section.recipe} {section.data} {labels} {section.folder.as_posix()}".lower()
    inside = tag("div", *_inside(section), class_="inside")
    attributes: dict[str, str | bool] = {"id": section.key, "class_": "card comparison", "data_words": words}
    held = inside if open_ else tag("template", inside)
    return tag("details", tag("summary", summary), held, open=open_, **attributes)


def _inside(section: Section) -> list[Raw]:
    parts: list[Raw] = []
    comparison = section.comparison
    if comparison is not None:
        facts = f"{comparison.model}, {comparison.epochs} epochs, {comparison.hardware}"
        parts.append(tag("p", facts, class_="quiet"))
        parts.append(reached_table(section))
        if section.problem:
            parts.append(tag("p", section.problem, class_="note"))
    parts.append(tag("div", *(figure(drawing) for drawing in section.figures), class_="figures"))
    if section.examples is not None:
        about = "Test pictures with what is in them, and with what each method found (its first seed)."
        sheet = tag("img", src=as_address(section.examples), alt=about, style="max-width:100%", loading="lazy")
        parts.append(tag("figure", sheet, tag("figcaption", about), id=f"{section.key}-examples"))
    if section.strips:
        strips = [figure(strip) for strip in section.strips]
        parts.append(tag("div", *strips, class_="figures strips"))
    if comparison is not None:
        parts += [tag("h3", "Costs"), cost_table(comparison.rows)]
        parts += [tag("p", note, class_="note") for note in comparison.notes[:20]]
    parts.append(fold("How to make each row again", reproduce_list(section), _made_with(section)))
    parts.append(fold(f"Every run ({len(section.runs)})", runs_table(section), open_=comparison is None))
    return parts


def _made_with(section: Section) -> Raw:
    versions = "; ".join(section.versions) or "not recorded"
    hardware = "; ".join(section.machines)
    return tag("p", f"Trained on {hardware}, with {versions}. Files: {section.folder.as_posix()}", class_="quiet")


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
