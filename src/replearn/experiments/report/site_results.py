"""The documentation's page of results, from the files under benchmarks/results: tables, figures, commands."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ..training.compare import Row
from ..training.comparison_table import difference, ratio, spread
from .collecting import Other, Reader
from .kinds import measured_in
from .measured import Measured, Table
from .others import is_rows, plain
from .reproducing import command_of
from .scene import Drawing
from .sections import Section, sections_of
from .svg import style_rules, titled_svg, variables

MOST_ROWS = 60
FOLDED = 24  # a longer table is folded


def results_page(folder: Path) -> str:
    """Every committed result, with the command that makes it."""
    collection = Reader(folder).read()
    measured, rest = measured_in(collection.others)
    parts = [
        "# Results",
        "",
        style(),
        "",
        "Written from the result files under `benchmarks/results`. Numbers are those of the last epoch, mean ± "
        "standard deviation over seeds; differences are taken seed by seed, with the 95 % interval of their mean.",
        "",
    ]
    for section in sections_of(collection):
        parts += [*_section(section), ""]
    for entry in measured:
        parts += [*_measured(entry), ""]
    for other, _ in rest:
        parts += [f"## {other.path.as_posix()}", "", *_other(other), ""]
    return "\n".join(parts)


STYLE = """\
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(14rem,100%),1fr));gap:1rem;align-items:start}
.md-typeset .figures figure{margin:0;width:100%}.figures svg{width:100%;height:auto;max-width:26rem}
.md-typeset table:not([class]) :is(td,th){padding:.4em .8em;min-width:0;white-space:nowrap}"""


def style() -> str:
    """The figures' colours, light and dark as the site's own switch says, and tables that scroll, not wrap."""
    schemes = ((0, "default"), (1, "slate"))
    shades = "".join(f"[data-md-color-scheme={name}]{{{variables(shade)}}}" for shade, name in schemes)
    return f"<style>{shades}{style_rules()}{STYLE}</style>"


def figures(drawings: tuple[Drawing, ...]) -> str:
    shown = ""
    for drawing in drawings:
        about = drawing.about[:1].upper() + drawing.about[1:]
        caption = f"<figcaption><b>{escape(drawing.title)}.</b> {escape(about)}</figcaption>"
        shown += f"<figure>{titled_svg(drawing)}{caption}</figure>"
    return f'<div class="figures">{shown}</div>' if shown else ""


def _section(section: Section) -> list[str]:
    lines = [f"## {section.recipe} on {section.data}", ""]
    if section.comparison is None:
        return [*lines, section.problem]
    comparison = section.comparison
    lines += [f"{comparison.model}, {comparison.epochs} epochs, {comparison.hardware}.", ""]
    name = section.metric.title.removeprefix("test ")
    heads = ("method", "seeds", name, "against E2E", "against removal", "paper", "time", "memory", "parameters")
    kept = Table(heads=heads, rows=tuple(_cells(row) for row in comparison.rows), left=(0, 3, 4))
    lines += [*table(kept), "", figures((*section.figures, *section.strips)), ""]
    lines += [*(f"- {note}" for note in comparison.notes), "", "```sh"]
    labels = {str(run.result.variant["label"]) for run in section.runs}
    for label in [row.label for row in comparison.rows if row.label in labels]:
        lines.append(command_of([run for run in section.runs if run.result.variant["label"] == label]))
    return [*lines, "```"]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.label,
        str(len(row.seeds)),
        spread(row.score, row.std),
        difference(row.against_e2e),
        difference(row.against_removal),
        spread(row.paper.score, row.paper.std) if row.paper else "",
        ratio(row.time_ratio),
        ratio(row.memory_ratio),
        f"{row.parameters:,}",
    )


def _measured(measured: Measured) -> list[str]:
    found = measured.found
    lines = [f"## {found.title}", "", f"{found.sentence[:1].upper()}{found.sentence[1:]}. {found.about}", ""]
    lines += [figures(found.figures), ""]
    for shown in found.tables:
        if len(shown.rows) > FOLDED or shown.folded:
            title = escape(shown.title or "Every number", quote=True)
            body = [f"    {line}" for line in table(shown)]
            lines += [f'??? note "{title} ({len(shown.rows)} rows)"', "", *body, ""]
            continue
        lines += [*([f"**{escaped(shown.title)}**", ""] if shown.title else []), *table(shown), ""]
    if measured.command:
        lines += ["```sh", measured.command, "```", ""]
    return [*lines, f"Measured on {escaped(measured.made_on)}. File: `{measured.path.as_posix()}`"]


def table(shown: Table) -> list[str]:
    """A Markdown table; columns that say nothing are left out."""
    used = [i for i in range(len(shown.heads)) if any(row[i] for row in shown.rows)]
    lines = ["| " + " | ".join(escaped(shown.heads[i]) for i in used) + " |"]
    lines.append("|" + "|".join("---" if i in shown.left else "---:" for i in used) + "|")
    return [*lines, *("| " + " | ".join(escaped(row[i]) for i in used) + " |" for row in shown.rows)]


def _other(other: Other) -> list[str]:
    data = other.data if isinstance(other.data, dict) else {"rows": other.data}
    lines = [f"- {key}: {escaped(plain(value))}" for key, value in data.items() if not is_rows(value)]
    for key, rows in data.items():
        if is_rows(rows):
            heads = tuple(dict.fromkeys(str(head) for row in rows for head in row))[:12]
            cells = tuple(tuple(plain(row.get(head)) for head in heads) for row in rows[:MOST_ROWS])
            lines += ["", f"### {key}", "", *table(Table(heads=heads, rows=cells))]
    return lines


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
