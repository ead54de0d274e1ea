"""Does it hold? The paper's claims beside what runs and benchmarks say of them.

Shown where runs of several tables lie together; the page of the documentation is written from the same tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ReplearnError
from .. import recipes
from ..bench.inference import FORMAT as INFERENCE
from ..bench.record import FORMAT as STEPS
from ..training.compare import Comparison, Row, compare, judged, paper_ratio
from ..training.comparison_table import difference, ratio, spread
from ..training.intervals import Difference
from ..training.recipe import PaperRow
from ..training.results import Result
from .collecting import Collection
from .kinds import Measured
from .markup import Entry, Raw, card, fold, table, tag, trained_by

NOT_HERE = ("svhn", "stl10", "imagenet", "coco", "cityscapes")  # data sets that no committed run was trained on
BROKEN = (ReplearnError, KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError)
PAPER = "What the paper prints"
RUNS = ("row", "against E2E", "p", "against removal", "p", "seeds", "epochs", "ours", "table", "paper")
Cells = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    title: str
    about: str
    heads: Cells
    rows: tuple[Cells, ...]  # a cell in backticks is code
    commands: Cells = ()


Claim = tuple[Comparison, Row, Cells]  # a row that is held against E2E, and the commands that trained its table


def entries(collection: Collection, measured: Sequence[Measured]) -> Iterator[Entry]:
    groups: dict[Path, list[Result]] = defaultdict(list)
    for run in collection.runs:
        groups[run.group].append(run.result)
    if len(groups) < 2:
        return
    known = {found.path for found in measured}
    benches = {other.path.name: other.data for other in collection.others if other.path in known}
    try:
        made = tables(list(groups.values()), benches)
    except BROKEN:  # of a benchmark's file
        made = tables(list(groups.values()), {})
    if made[0].title != PAPER:
        return
    note = "Verdicts are corrected by Holm's method over the differences of a table."
    yield card("holds", "Does it hold?", tag("p", note, class_="quiet"), *map(_fold, made))


def _fold(shown: Table) -> Raw:
    rows = [[tag("code", cell.strip("`")) if cell.startswith("`") else cell for cell in row] for row in shown.rows]
    trained = [trained_by(shown.commands)] if shown.commands else []
    title = f"{shown.title} ({len(shown.rows)} rows)"
    return fold(title, tag("p", shown.about), table(shown.heads, rows, shown.title), *trained)


def tables(groups: Sequence[Sequence[Result]], benches: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """All tables of the page, from the runs of every file and from benchmarks' files by name."""
    paper, other = claims(groups)
    made = [
        Table(
            title=PAPER,
            about="Scores are E2E's, then the row's; p is corrected for all differences of the table.",
            heads=RUNS,
            rows=tuple(map(_cells, paper)),
            commands=_commands(paper),
        ),
        Table(
            title="The same question on other data and with other forms",
            about="Rows that the paper does not have. Scores are E2E's, then the row's.",
            heads=RUNS[:-1],
            rows=tuple(_cells(claim)[:-1] for claim in other),
            commands=_commands(other),
        ),
        Table(
            title="Time and memory of a training step",
            about="RepL as a share of E2E, taking turns in one process, with quartiles over rounds.",
            heads=("model", "backend", "verdict", "time", "paper: time", "memory", "paper: memory", "file"),
            rows=tuple(row for name, data in benches.items() for row in _steps(name, data)),
        ),
        Table(
            title="Inference of the deployed model",
            about="How many times as fast as E2E, or as the model before deploying, with quartiles over rounds.",
            heads=("model", "backend", "verdict", "ours", "paper", "batch", "table", "file"),
            rows=tuple(row for name, data in benches.items() for row in _inference(name, data)),
        ),
        Table(
            title="Not judged here",
            about="The command trains what decides it.",
            heads=("table", "model", "data", "why not", "paper", "command"),
            rows=tuple(_unjudged({(comparison.recipe, comparison.data) for comparison, _, _ in paper})),
        ),
    ]
    return [table for table in made if table.rows]


def claims(groups: Sequence[Sequence[Result]]) -> tuple[list[Claim], list[Claim]]:
    """Rows that the paper prints, and others; of a recipe in several files, those that were trained longest.

    The verdicts of each list are corrected for all its differences.
    """
    longest: dict[tuple[str, str], list[Claim]] = {}
    for group in groups:
        try:
            comparisons = compare(group)
        except BROKEN:  # nothing finished, or runs that can't be compared
            continue
        for comparison in comparisons:
            key = comparison.recipe, comparison.data
            if key in longest and longest[key][0][0].epochs >= comparison.epochs:
                continue
            runs = [run for run in group if (run.recipe["name"], run.data) == key]
            commands = tuple(dict.fromkeys(run.command for run in runs if run.command))
            if rows := [row for row in comparison.rows if row.against_e2e]:
                longest[key] = [(comparison, row, commands) for row in rows]
    found = [claim for held in longest.values() for claim in held]
    paper, other = ([claim for claim in found if bool(claim[1].paper) == printed] for printed in (True, False))
    return _judged(paper), _judged(other)


def _judged(some: Sequence[Claim]) -> list[Claim]:
    rows = judged([row for _, row, _ in some])
    return [(comparison, row, commands) for (comparison, _, commands), row in zip(some, rows, strict=True)]


def _cells(claim: Claim) -> Cells:
    comparison, row, _ = claim
    base = next(each for each in comparison.rows if each.method == "e2e")
    shipped = recipes.recipe(comparison.recipe).epochs if comparison.recipe in recipes.available() else row.epochs
    return (
        f"{comparison.model}, {comparison.data}: {row.label}",
        difference(row.against_e2e),
        _p(row.against_e2e),
        difference(row.against_removal),
        _p(row.against_removal),
        str(len(row.seeds)),
        f"{row.epochs} of {shipped}" if row.epochs < shipped else str(row.epochs),
        f"{spread(base.score, base.std)}, {spread(row.score, row.std)}",
        row.paper.table if row.paper else comparison.recipe,
        ", ".join(spread(paper.score, paper.std) for paper in (base.paper, row.paper) if paper),
    )


def _commands(some: Sequence[Claim]) -> Cells:
    return tuple(dict.fromkeys(text for _, _, commands in some for text in commands))


def _p(value: Difference | None) -> str:
    return "" if value is None or value.corrected is None else f"{value.corrected:.3f}"


def _steps(name: str, data: Mapping[str, Any]) -> Iterator[Cells]:
    for entry in data["training"] if data.get("format") == STEPS else ():
        row = next((row for row in entry["rows"] if row["label"] == "RepL"), None)
        if row is not None and (paper := _paper_costs(str(entry["case"]["model"]))):
            shares = *_verdict(row["time"], True), paper[0], ratio(row["memory_ratio"]), paper[1]
            yield entry["title"], entry["backend"], *shares, f"`{name}`"


def _paper_costs(model: str) -> Cells:
    """The paper's time and memory of RepL over E2E's; nothing where it prints none."""
    for recipe in map(recipes.recipe, recipes.available()):
        rows = {row.label: row for row in recipe.paper if row.data == recipe.data[0] and row.seconds_per_epoch}
        e2e, repl = rows.get("E2E"), rows.get("RepL") or rows.get("RepL first=2")
        if recipe.model == model and e2e and repl:
            return tuple(ratio(paper_ratio(repl, e2e, field)) for field in ("seconds_per_epoch", "memory_gb"))
    return ()


def _inference(name: str, data: Mapping[str, Any]) -> Iterator[Cells]:
    for row in data["rows"] if data.get("format") == INFERENCE else ():
        for label, printed in row["paper"].items():
            base = "RepL dynamic" if "dynamic" in label else "E2E"
            if found := row["speedup"].get(f"RepL deployed against {base}"):
                shares = *_verdict(found, False), ratio(printed["speedup"])
                yield row["model"], row["backend"], *shares, str(row["batch"]), label, f"`{name}`"


def _verdict(value: Mapping[str, float], lower: bool) -> tuple[str, str]:
    """On which side of 1 the quartiles of a ratio lie, and the ratio with them."""
    low, high = value["low"], value["high"]
    word = "undecided" if low <= 1 <= high else "better" if (high < 1) == lower else "worse"
    return word, f"{value['median']:.3f} [{low:.3f}, {high:.3f}]"


def _unjudged(done: set[tuple[str, str]]) -> Iterator[Cells]:
    """Every recipe and data set that the paper prints and no run decides."""
    for recipe in map(recipes.recipe, recipes.available()):
        more = " --pretrained FILE" if "--pretrained" in recipes.claim(recipe.name)["Command"] else ""
        for data in recipe.data:
            rows = [row for row in recipe.paper if row.data == data]
            if len(rows) > 1 and (recipe.name, data) not in done:
                why = "no data here" if data in NOT_HERE else "not trained yet"
                words = f"`replearn compare {recipe.name} --data {data} --seeds 0-4{more}`"
                yield recipe.table, recipe.model, data, why, _printed(rows), words


def _printed(rows: Sequence[PaperRow]) -> str:
    return ", ".join(
        dict.fromkeys(f"{row.label.removesuffix(' first=2')} {spread(row.score, row.std)}" for row in rows)
    )
