"""The pages of the documentation that are written by the code itself: operator cards, results, the API."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import replearn

from ..operators import available
from ..operators.options import Options
from ..training.compare import Row
from ..training.comparison_table import difference, ratio, spread
from .collecting import Collection, Other, Reader
from .others import is_rows, plain
from .reproducing import command_of
from .sections import Section, sections_of


def operators_page() -> str:
    """A card for each operator: its formula, cost and failures from its file's docstring, and its options."""
    head = (
        "# Operators\n\nWritten by the operators' own docstrings. `norm` divides each output row by its length; "
    )
    head += (
        "`prev` and `next` are the kept neighbours; C is the width, H the number of heads, d the token's width.\n"
    )
    return "\n".join([head, *(operator_card(options) for options in available().values())])


def operator_card(options: type[Options]) -> str:
    """One card as Markdown. The formula is the indented part of the docstring, as it stands there."""
    doc = inspect.getdoc(import_module(options.__module__)) or ""
    title, _, rest = doc.partition("\n")
    formula = "\n".join(line[4:] for line in rest.splitlines() if line.startswith("    "))
    prose = "\n".join(line for line in rest.splitlines() if not line.startswith("    ")).strip()
    prose = re.sub(r"^(Cost|Fails|Learnable):", r"\n**\1:**", prose, flags=re.MULTILINE)
    kinds = ", ".join(options.kinds)
    default = f", the default for `{options.default_for}`" if options.default_for else ""
    lines = [
        f"## {options.__name__}",
        "",
        title,
        "",
        "```text",
        formula,
        "```",
        "",
        prose,
        "",
        f"**For blocks of kind:** {kinds}{default}. **Name in plans and on the command line:** `{options.name}`.",
        "",
    ]
    fields = dataclasses.fields(options)
    if fields:
        lines += ["| option | default |", "|---|---|"]
        lines += [f"| `{field.name}` | `{field.default!r}` |" for field in fields]
    return "\n".join([*lines, ""])


def results_page(folder: Path) -> str:
    """Every committed result as tables, with the command that makes it."""
    collection = Reader(folder).read()
    parts = [
        "# Results",
        "",
        "Written from the result files under `benchmarks/results`. Numbers are those of the last epoch, mean ± "
        "standard deviation over seeds; differences are taken seed by seed, with the 95 % interval of their mean.",
        "",
    ]
    for section in sections_of(collection):
        parts += [*_section(section), ""]
    parts += [*_others(collection), ""]
    return "\n".join(parts)


def _section(section: Section) -> list[str]:
    lines = [f"## {section.recipe} on {section.data}", ""]
    if section.comparison is None:
        return [*lines, section.problem]
    comparison = section.comparison
    lines += [f"{comparison.model}, {comparison.epochs} epochs, {comparison.hardware}.", ""]
    name = section.metric.title.removeprefix("test ")
    heads = ("method", "seeds", name, "against E2E", "against removal", "paper", "time", "memory", "parameters")
    lines += ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in comparison.rows]
    lines += ["", *(f"- {note}" for note in comparison.notes), "", "```sh"]
    labels = {str(run.result.variant["label"]) for run in section.runs}
    for label in [row.label for row in comparison.rows if row.label in labels]:
        lines.append(command_of([run for run in section.runs if run.result.variant["label"] == label]))
    return [*lines, "```"]


def _cells(row: Row) -> list[str]:
    paper = spread(row.paper.score, row.paper.std) if row.paper else ""
    return [
        row.label,
        str(len(row.seeds)),
        spread(row.score, row.std),
        difference(row.against_e2e),
        difference(row.against_removal),
        paper,
        ratio(row.time_ratio),
        ratio(row.memory_ratio),
        f"{row.parameters:,}",
    ]


def _others(collection: Collection) -> list[str]:
    lines: list[str] = []
    for other in collection.others:
        lines += [f"## {other.path.as_posix()}", "", *_other(other), ""]
    return lines


def _other(other: Other, most: int = 60) -> list[str]:
    data = other.data if isinstance(other.data, dict) else {"rows": other.data}
    lines = [f"- {key}: {escaped(plain(value))}" for key, value in data.items() if not is_rows(value)]
    for key, rows in data.items():
        if is_rows(rows):
            heads = list(dict.fromkeys(str(head) for row in rows for head in row))[:12]
            lines += ["", f"### {key}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
            lines += [
                "| " + " | ".join(escaped(plain(row.get(head))) for head in heads) + " |" for row in rows[:most]
            ]
    return lines


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def api_page() -> str:
    """Every public name with its signature and docstring."""
    lines = ["# API", "", "Every public name, by its own docstring. The [tour](tour.md) shows them at work.", ""]
    for name in replearn.__all__:
        thing = getattr(replearn, name)
        if inspect.ismodule(thing):
            lines += [f"## replearn.{name}", "", inspect.getdoc(thing) or "", ""]
            continue
        lines += [f"## replearn.{name}", "", *_signature(name, thing), *_doc(thing), ""]
    return "\n".join(lines)


def _signature(name: str, thing: Any) -> list[str]:
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return []
    try:
        shown = str(inspect.signature(thing))
    except (TypeError, ValueError):
        return []
    return ["```text", f"{name}{shown}", "```", ""]


def _doc(thing: Any) -> list[str]:
    """A docstring as Markdown: what follows `>>>` is fenced."""
    lines: list[str] = []
    fenced = False
    for line in (inspect.getdoc(thing) or "").splitlines():
        code = line.startswith((">>>", "...")) or (fenced and bool(line.strip()))
        if code != fenced:
            lines.append("```pycon" if code else "```")
            fenced = code
        lines.append(line)
    return [*lines, "```"] if fenced else lines
