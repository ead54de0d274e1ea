"""Does it hold? The paper's claims beside what runs and benchmarks say of them.

Shown where runs of several tables lie together; the page of the documentation is written from the same tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .. import recipes
from ..training.compare import Comparison, Row, judged
from ..training.comparison_table import spread
from ..training.intervals import Difference
from ..training.recipe import PaperRow
from .benchmarks import Kind, Line, Measured
from .comparisons import difference
from .markup import Entry, Raw, card, fold, table, tag, trained_by
from .sections import Section

NOT_HERE = ("svhn", "stl10", "imagenet", "coco", "cityscapes")  # data sets that no committed run was trained on
PAPER = "What the paper prints"
RUNS = ("row", "against E2E", "against removal", "seeds", "epochs", "ours", "paper", "table")
Cells = tuple[str | Difference | None, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    about: str
    heads: Sequence[str]
    rows: tuple[Cells, ...]  # a text in backticks is code
    commands: Sequence[str] = ()


Claim = tuple[Section, Comparison, Row]  # a row that is held against E2E


def entries(sections: Sequence[Section], measured: Measured) -> Iterator[Entry]:
    made = tables(sections, measured) if len({section.folder for section in sections}) > 1 else []
    if made and made[0].title == PAPER:
        yield card("holds", "Does it hold?", *map(_fold, made))


def _fold(shown: Table) -> Raw:
    rows = [[cell if isinstance(cell, str) else difference(cell) for cell in row] for row in shown.rows]
    trained = [trained_by(shown.commands)] if shown.commands else []
    title, made = f"{shown.title} ({len(rows)} rows)", table(shown.heads, rows, shown.title)
    return fold(title, tag("p", shown.about), made, *trained, open_=shown.title == PAPER)


def tables(sections: Sequence[Section], measured: Measured) -> list[Table]:
    """All tables of the page."""
    paper, other = claims(sections)
    made = [
        Table(
            title=PAPER,
            about=f"{_counted(paper)} Scores are E2E's, then the row's; p is corrected by Holm's method for all "
            "differences of the table.",
            heads=RUNS,
            rows=tuple(map(_cells, paper)),
            commands=_commands(paper),
        ),
        Table(
            title="The same question on other data and with other forms",
            about=f"Rows that the paper does not have. {_counted(other)}",
            heads=(*RUNS[:-2], "recipe"),
            rows=tuple((*_cells(claim)[:-2], claim[1].recipe) for claim in other),
            commands=_commands(other),
        ),
        *(_costs(*each) for each in measured.items()),
        Table(
            title="Not judged here",
            about="The command trains what decides it.",
            heads=("row", "paper", "command", "why not", "table"),
            rows=tuple(_unjudged({(section.recipe, section.data) for section, _, _ in paper})),
        ),
    ]
    return [table for table in made if table.rows]


def _costs(kind: Kind, lines: Sequence[Line]) -> Table:
    """What benchmarks of a kind say where the paper prints a number."""
    found = [line for line in lines if line.get(kind.paper)]
    rows = tuple(tuple(line.values()) for line in found)
    return Table(title=kind.title, about=kind.about, heads=tuple(found[0]) if found else (), rows=rows)


def claims(sections: Sequence[Section]) -> tuple[list[Claim], list[Claim]]:
    """Rows that the paper prints, and others; of a recipe in several files, those that were trained longest.

    The verdicts of each list are corrected for all its differences.
    """
    longest: dict[tuple[str, str], list[Claim]] = {}
    for section in sections:
        if (comparison := section.comparison) is None:
            continue
        held = longest.get(key := (section.recipe, section.data))
        if held and held[0][1].epochs >= comparison.epochs:
            continue
        if rows := [row for row in comparison.rows if row.against_e2e]:
            longest[key] = [(section, comparison, row) for row in rows]
    found = [claim for held in longest.values() for claim in held]
    paper, other = ([claim for claim in found if bool(claim[2].paper) == printed] for printed in (True, False))
    return _judged(paper), _judged(other)


def _judged(some: Sequence[Claim]) -> list[Claim]:
    rows = judged([row for _, _, row in some])
    return [(section, comparison, row) for (section, comparison, _), row in zip(some, rows, strict=True)]


def _cells(claim: Claim) -> Cells:
    _, comparison, row = claim
    base = next(each for each in comparison.rows if each.method == "e2e")
    shipped = recipes.recipe(comparison.recipe).epochs if comparison.recipe in recipes.available() else row.epochs
    return (
        f"{comparison.model}, {comparison.data}: {row.label}",
        row.against_e2e,
        row.against_removal,
        str(len(row.seeds)),
        f"{row.epochs} of {shipped}" if row.epochs < shipped else str(row.epochs),
        f"{spread(base.score, base.std)}, {spread(row.score, row.std)}",
        ", ".join(spread(paper.score, paper.std) for paper in (base.paper, row.paper) if paper),
        row.paper.table if row.paper else "",
    )


def _counted(some: Sequence[Claim]) -> str:
    """The answer in a sentence: how many rows are better, and how many worse, than each baseline."""
    against = {
        "E2E": Counter(row.against_e2e.verdict for *_, row in some if row.against_e2e),
        "removal": Counter(row.against_removal.verdict for *_, row in some if row.against_removal),
    }
    return " ".join(
        f"Against {name} {count['better']} better, {count['worse']} worse, {count['undecided']} undecided."
        for name, count in against.items()
    )


def _commands(some: Sequence[Claim]) -> Sequence[str]:
    runs = (run.result.command for section, _, _ in some for run in section.runs)
    return tuple(dict.fromkeys(command for command in runs if command))


def _unjudged(done: set[tuple[str, str]]) -> Iterator[Cells]:
    """Every recipe and data set that the paper prints and no run decides."""
    for recipe in map(recipes.recipe, recipes.available()):
        more = " --pretrained FILE" if "--pretrained" in recipes.claim(recipe.name)["Command"] else ""
        for data in recipe.data:
            rows = [row for row in recipe.paper if row.data == data]
            if len(rows) > 1 and (recipe.name, data) not in done:
                why = "no data here" if data in NOT_HERE else "not trained yet"
                words = f"`replearn compare {recipe.name} --data {data} --seeds 0-4{more}`"
                yield f"{recipe.model}, {data}", _printed(rows), words, why, recipe.table


def _printed(rows: Sequence[PaperRow]) -> str:
    return ", ".join(
        dict.fromkeys(f"{row.label.removesuffix(' first=2')} {spread(row.score, row.std)}" for row in rows)
    )
