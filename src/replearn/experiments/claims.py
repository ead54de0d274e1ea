"""Does it hold? The paper's claims beside what committed runs and benchmarks say of them, as plain tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ReplearnError
from . import recipes
from .bench.inference import FORMAT as INFERENCE
from .bench.record import FORMAT as STEPS
from .training.compare import Comparison, Row, compare, paper_ratio
from .training.comparison_table import difference, ratio, spread
from .training.intervals import Difference, corrected
from .training.recipe import PaperRow, Recipe
from .training.results import Result

NOT_HERE = ("svhn", "stl10", "imagenet", "coco", "cityscapes")  # data sets that no committed run was trained on


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the page: what it says, and its cells as text."""

    title: str
    about: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(groups: Sequence[Sequence[Result]], benches: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """All tables of the page, of the runs of every file and of benchmarks' files by name; empty ones are left out.

    Verdicts are corrected by Holm's method over all differences of a table.
    """
    found = judged(groups)
    paper = family([(comparison, row) for comparison, row in found if row.paper is not None])
    other = family([(comparison, row) for comparison, row in found if row.paper is None])
    heads = ("table", "row", "seeds", "epochs", "paper", "ours", "against E2E", "p", "against removal", "p")
    made = [
        Table(
            title="What the paper prints",
            about="E2E, then the row; differences are seed by seed, with 95 % intervals and corrected p.",
            heads=heads,
            rows=tuple(_claim(comparison, row) for comparison, row in paper),
        ),
        Table(
            title="The same question on other data and other forms",
            about="Rows that the paper does not have.",
            heads=heads[:4] + heads[5:],
            rows=tuple(cells[:4] + cells[5:] for cells in (_claim(*entry) for entry in other)),
        ),
        Table(
            title="How these runs were made",
            about="Each command goes on where its runs are, and trains what is missing.",
            heads=("recipe", "data", "hardware", "command", "commit"),
            rows=tuple(dict.fromkeys(made_with([comparison for comparison, _ in found], groups))),
        ),
        Table(
            title="Time and memory of a training step",
            about="RepL as a share of E2E, taking turns in one process; quartiles over rounds.",
            heads=("model", "backend", "paper: time", "ours", "verdict", "paper: memory", "ours", "file"),
            rows=tuple(row for name, data in benches.items() for row in steps(name, data)),
        ),
        Table(
            title="Inference of the deployed model",
            about="How many times as fast as E2E, or as the model before deploying; quartiles over rounds.",
            heads=("table", "model", "backend", "batch", "paper", "ours", "verdict", "file"),
            rows=tuple(row for name, data in benches.items() for row in inference(name, data)),
        ),
        Table(
            title="Not judged here",
            about="The command trains what decides it.",
            heads=("table", "model", "data", "paper", "why not", "command"),
            rows=tuple(unjudged([comparison for comparison, _ in paper])),
        ),
    ]
    return [table for table in made if table.rows]


def judged(groups: Sequence[Sequence[Result]]) -> list[tuple[Comparison, Row]]:
    """The rows that are held against E2E; of a recipe in several files the one that was trained longest."""
    longest: dict[tuple[str, str], Comparison] = {}
    for group in groups:
        try:
            comparisons = compare(group)
        except ReplearnError:  # nothing finished, or runs that can't be compared: the report says so elsewhere
            continue
        for comparison in comparisons:
            held = longest.get((comparison.recipe, comparison.data))
            if held is None or comparison.epochs > held.epochs:
                longest[comparison.recipe, comparison.data] = comparison
    return [(comparison, row) for comparison in longest.values() for row in comparison.rows if row.against_e2e]


def family(rows: Sequence[tuple[Comparison, Row]]) -> list[tuple[Comparison, Row]]:
    """The rows with verdicts that are corrected for all differences among them."""
    differences = [each for _, row in rows for each in (row.against_e2e, row.against_removal) if each is not None]
    again = iter(corrected(differences))
    found = []
    for comparison, row in rows:
        own, removal = next(again), next(again) if row.against_removal is not None else None
        found.append((comparison, replace(row, against_e2e=own, against_removal=removal)))
    return found


def _claim(comparison: Comparison, row: Row) -> tuple[str, ...]:
    base = next(each for each in comparison.rows if each.method == "e2e")
    shipped = recipes.recipe(comparison.recipe).epochs if comparison.recipe in recipes.available() else row.epochs
    printed = f"{_printed(base.paper)}, {_printed(row.paper)}" if base.paper and row.paper else ""
    return (
        row.paper.table if row.paper else comparison.recipe,
        f"{comparison.model}, {comparison.data}: {row.label}",
        str(len(row.seeds)),
        f"{row.epochs} of {shipped}" if row.epochs < shipped else str(row.epochs),
        printed,
        f"{spread(base.score, base.std)}, {spread(row.score, row.std)}",
        difference(row.against_e2e),
        _p(row.against_e2e),
        difference(row.against_removal),
        _p(row.against_removal),
    )


def _printed(row: PaperRow) -> str:
    return spread(row.score, row.std)


def _p(value: Difference | None) -> str:
    return "" if value is None or value.corrected is None else f"{value.corrected:.3f}"


def made_with(comparisons: Sequence[Comparison], groups: Sequence[Sequence[Result]]) -> Iterator[tuple[str, ...]]:
    for comparison in comparisons:
        for result in (result for group in groups for result in group):
            about = (result.recipe["name"], result.data, result.recipe["epochs"])
            if about == (comparison.recipe, comparison.data, comparison.epochs) and result.command:
                command = f"`{result.command}`"
                yield comparison.recipe, comparison.data, comparison.hardware, command, result.commit


def steps(name: str, data: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Of a file of `replearn bench steps`: RepL's time and memory beside the paper's for this model."""
    for entry in data["training"] if data.get("format") == STEPS else ():
        row = next((row for row in entry["rows"] if row["label"] == "RepL"), None)
        paper = _costs(str(entry["case"]["model"]))
        if row is not None and any(paper):
            yield (
                entry["title"],
                entry["backend"],
                ratio(paper[0]),
                _quartiles(row["time"]),
                _side(row["time"], lower=True),
                ratio(paper[1]),
                ratio(row["memory_ratio"]),
                f"`{name}`",
            )


def _costs(model: str) -> tuple[float | None, float | None]:
    """The paper's time and memory of RepL over E2E's for a model."""
    for recipe in map(recipes.recipe, recipes.available()):
        rows = {row.label: row for row in recipe.paper if row.data == recipe.data[0] and row.seconds_per_epoch}
        repl = rows.get("RepL") or rows.get("RepL first=2")
        if recipe.model == model and "E2E" in rows and repl:
            fields = ("seconds_per_epoch", "memory_gb")
            time, memory = (paper_ratio(repl, rows["E2E"], field) for field in fields)
            return time, memory
    return None, None


def inference(name: str, data: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Of a file of `replearn bench inference`: the rows that the paper prints too."""
    for row in data["rows"] if data.get("format") == INFERENCE else ():
        for table, printed in row["paper"].items():
            base = "RepL dynamic" if "dynamic" in table else "E2E"
            if found := row["speedup"].get(f"RepL deployed against {base}"):
                about = (table, row["model"], row["backend"], str(row["batch"]), ratio(printed["speedup"]))
                yield *about, _quartiles(found), _side(found, lower=False), f"`{name}`"


def _quartiles(value: Mapping[str, float]) -> str:
    return f"{value['median']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def _side(value: Mapping[str, float], *, lower: bool) -> str:
    """On which side of 1 the quartiles lie, in the words of the other verdicts."""
    if value["low"] <= 1 <= value["high"]:
        return "undecided"
    return "better" if (value["high"] < 1) == lower else "worse"


def unjudged(done: Sequence[Comparison]) -> Iterator[tuple[str, ...]]:
    """Every recipe and data set that the paper prints and no run here decides."""
    there = {(comparison.recipe, comparison.data) for comparison in done}
    for recipe in map(recipes.recipe, recipes.available()):
        for data in recipe.data:
            rows = [row for row in recipe.paper if row.data == data]
            if len(rows) > 1 and (recipe.name, data) not in there:
                why = "no data here" if data in NOT_HERE else "not trained yet"
                yield recipe.table, recipe.model, data, _scores(rows), why, _command(recipe, data)


def _scores(rows: Sequence[PaperRow]) -> str:
    return ", ".join(dict.fromkeys(f"{row.label.removesuffix(' first=2')} {_printed(row)}" for row in rows))


def _command(recipe: Recipe, data: str) -> str:
    more = " --pretrained FILE" if "--pretrained" in recipes.claim(recipe.name)["Command"] else ""
    return f"`replearn compare {recipe.name} --data {data} --seeds 0-4{more}`"
