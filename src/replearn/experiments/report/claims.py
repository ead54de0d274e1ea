"""Does it hold? The paper's claims beside what runs and benchmarks say of them.

Shown where runs of several tables lie together; the page of the documentation is written from the same tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .. import recipes
from ..training.compare import Comparison, Row, judged
from ..training.comparison_table import spread
from ..training.intervals import Difference
from ..training.recipe import PaperRow
from .benchmarks import Kind, Line, Measured
from .comparisons import difference
from .markup import VERDICTS, Entry, Raw, card, fold, table, tag, trained_by
from .sections import Section

NOT_HERE = ("svhn", "stl10", "imagenet", "coco", "cityscapes")  # data sets that no committed run was trained on
SHORT, PAPER = "In short", "What the paper prints"
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
    if any(each.title == PAPER for each in made):
        yield card("holds", "Does it hold?", *map(_fold, made))


def _fold(shown: Table) -> Raw:
    rows = [[cell if isinstance(cell, str) else difference(cell) for cell in row] for row in shown.rows]
    trained = [trained_by(shown.commands)] if shown.commands else []
    title, made = f"{shown.title} ({len(rows)} rows)", table(shown.heads, rows, shown.title)
    return fold(title, tag("p", shown.about), made, *trained, open_=shown.title in (SHORT, PAPER))


def tables(sections: Sequence[Section], measured: Measured) -> list[Table]:
    """All tables of the page."""
    paper, other = claims(sections)
    unjudged = tuple(_unjudged({(section.recipe, section.data) for section, _, _ in paper}))
    reasons = ", ".join(f"{count} {why}" for why, count in Counter(row[3] for row in unjudged).items())
    made = [
        Table(
            title=SHORT,
            about="Where the paper prints a number for RepL; its scores by means. RepL dynamic: before deploying.",
            heads=("RepL", "here", "in the paper"),
            rows=tuple(_answers(paper, measured)),
        ),
        Table(
            title=PAPER,
            about="Scores: E2E's → the row's. p is corrected by Holm's method for all differences of the table.",
            heads=RUNS,
            rows=tuple(map(_cells, paper)),
            commands=_commands(paper),
        ),
        Table(
            title="The same question on other data and with other forms",
            about=f"Rows that the paper does not have. Against E2E {_verdicts(other, 'E2E')}; "
            f"against removal {_verdicts(other, 'removal')}.",
            heads=(*RUNS[:-2], "recipe"),
            rows=tuple((*_cells(claim)[:-2], claim[1].recipe) for claim in other),
            commands=_commands(other),
        ),
        *(_costs(*each) for each in measured.items()),
        Table(
            title="Not judged here",
            about=f"The command trains what decides it. {reasons}.",
            heads=("row", "paper", "command", "why not", "table"),
            rows=unjudged,
        ),
    ]
    return [table for table in made if table.rows]


def _answers(paper: Sequence[Claim], measured: Measured) -> Iterator[Cells]:
    """What came out for RepL: verdicts against each baseline, the paper's by its means, and the span of ratios."""
    repl = [claim for claim in paper if "repl" in claim[2].method]
    for base in ("E2E", "removal") if repl else ():
        yield f"score against {base}", _verdicts(repl, base), _tally(_in_print(claim, base) for claim in repl)
    for kind, lines in measured.items():
        for what, (ours, theirs) in kind.paper.items():
            for base in dict.fromkeys(line.get("against", "E2E") for line in lines if line[theirs]):
                some = [line for line in lines if line[theirs] and line.get("against", "E2E") == base]
                values = ([float(line[head].split()[0]) for line in some] for head in (ours, theirs))
                yield f"{what} / {base}", *(f"{min(each):.2f} to {max(each):.2f}" for each in values)


def _tally(words: Iterable[str]) -> str:
    count = Counter(words)
    return ", ".join(f"{count[word]} {word}" for word in VERDICTS if count[word])


def _verdicts(some: Sequence[Claim], base: str) -> str:
    found = [row.against_e2e if base == "E2E" else row.against_removal for *_, row in some]
    return _tally(each.verdict for each in found if each)


def _in_print(claim: Claim, base: str) -> str:
    _, comparison, row = claim
    held = next((each.paper for each in comparison.rows if each.method == base.lower()), None)
    gap = comparison.metric.sign * (row.paper.score - held.score) if row.paper and held else 0
    return "better" if gap > 0 else "worse" if gap else ""


def _costs(kind: Kind, lines: Sequence[Line]) -> Table:
    """What benchmarks of a kind say where the paper prints a number."""
    found = [line for line in lines if any(line[theirs] for _, theirs in kind.paper.values())]
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
    some = ([claim for claim in found if bool(claim[2].paper) == printed] for printed in (True, False))
    paper, other = (
        [(*c[:2], row) for c, row in zip(part, judged([c[2] for c in part]), strict=True)] for part in some
    )
    return paper, other


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
        _arrow(base, row),
        _arrow(*(paper for paper in (base.paper, row.paper) if paper)),
        row.paper.table if row.paper else "",
    )


def _arrow(*scores: Row | PaperRow) -> str:
    return " → ".join(spread(each.score, each.std).replace(" ", "\u00a0") for each in scores)


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
                scores = [f"{row.label.removesuffix(' first=2')} {spread(row.score, row.std)}" for row in rows]
                yield f"{recipe.model}, {data}", ", ".join(dict.fromkeys(scores)), words, why, recipe.table
