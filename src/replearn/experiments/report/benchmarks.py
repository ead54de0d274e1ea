"""Files that `replearn bench` writes: a table and the command of each.

A kind of file is a function that reads its data into lines; all else is the same for every kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import recipes
from ..bench.inference import FORMAT as INFERENCE
from ..bench.record import FORMAT as STEPS
from ..training.compare import paper_ratio
from ..training.comparison_table import ratio
from ..training.recipe import slug
from .collecting import Other
from .markup import Entry, columns, command, fold, folded, tag

BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)
MOST = 200  # files
MOST_LINES = 24  # a longer table is folded
Line = dict[str, str]  # of a table, by column


@dataclass(frozen=True, kw_only=True)
class Kind:
    title: str
    about: str  # how to read the table
    read: Callable[[Mapping[str, Any]], Iterator[Line]]
    judged: tuple[str, str]  # the column and the cell of lines that hold RepL against E2E
    paper: str  # the column of the paper's number


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One file, shown."""

    key: str
    title: str  # unique in a report
    sentence: str  # what it comes to
    about: str
    kind: Kind
    lines: tuple[Line, ...]
    path: Path
    made_on: str
    command: str


def steps(data: Mapping[str, Any]) -> Iterator[Line]:
    """Training steps: time and memory of every candidate over E2E's."""
    for entry in data["training"]:
        for row in entry["rows"]:
            if (label := row["label"]) == "E2E":
                continue
            time, memory = paper_costs(str(entry["case"]["model"])) if label == "RepL" else (None, None)
            yield {
                "model": entry["title"],
                "backend": entry["backend"],
                "row": label,
                **verdict("time", row["time"], lower=True),
                "paper: time": ratio(time),
                "memory": ratio(row["memory_ratio"]),
                "paper: memory": ratio(memory),
            }


def paper_costs(model: str) -> tuple[float | None, float | None]:
    """The paper's time and memory of RepL over E2E's; None where it prints none."""
    for recipe in map(recipes.recipe, recipes.available()):
        rows = {row.label: row for row in recipe.paper if row.data == recipe.data[0] and row.seconds_per_epoch}
        e2e, repl = rows.get("E2E"), rows.get("RepL") or rows.get("RepL first=2")
        if recipe.model == model and e2e and repl:
            return paper_ratio(repl, e2e, "seconds_per_epoch"), paper_ratio(repl, e2e, "memory_gb")
    return None, None


def inference(data: Mapping[str, Any]) -> Iterator[Line]:
    """Inference: how many times as fast the deployed model is as E2E, and as the model before deploying."""
    for row in data["rows"]:
        for base, part in (("E2E", "bp"), ("RepL dynamic", "dynamic")):
            if (value := row["speedup"].get(f"RepL deployed against {base}")) is None:
                continue
            table = next((table for table in row["paper"] if part in table.partition("_vs_")[0]), "")
            yield {
                "model": row["model"],
                "batch": str(row["batch"]),
                "backend": row["backend"],
                "against": base,
                **verdict("speedup", value, lower=False),
                "paper": ratio(row["paper"][table]["speedup"]) if table else "",
                "table": table,
            }


def verdict(name: str, value: Mapping[str, float], *, lower: bool) -> Line:
    """On which side of 1 the quartiles of a ratio lie, and the ratio with them."""
    low, high = value["low"], value["high"]
    word = "undecided" if low <= 1 <= high else "better" if (high < 1) == lower else "worse"
    return {"verdict": word, name: f"{value['median']:.3f} [{low:.3f}, {high:.3f}]"}


KINDS = {
    STEPS: Kind(
        title="Time and memory of a training step",
        about="Shares of E2E, taking turns in one process, with quartiles over rounds.",
        read=steps,
        judged=("row", "RepL"),
        paper="paper: time",
    ),
    INFERENCE: Kind(
        title="Inference of the deployed model",
        about="How many times as fast as E2E, or as the model before deploying, with quartiles over rounds.",
        read=inference,
        judged=("against", "E2E"),
        paper="paper",
    ),
}


def measured_in(others: Sequence[Other]) -> tuple[list[Measured], list[tuple[Path, str]]]:
    """The files of a known kind, shown, and the paths of all others with the reason."""
    known: list[Measured] = []
    rest: list[tuple[Path, str]] = []
    for other in others:
        data = other.data if isinstance(other.data, dict) else {}
        kind = KINDS.get(str(data.get("format"))) if data.get("training") or data.get("rows") else None
        if kind is None or len(known) >= MOST:
            rest.append((other.path, "measurements of a kind that a report does not show"))
            continue
        try:
            known.append(shown(kind, other))
        except BROKEN as error:
            rest.append((other.path, f"looks like {kind.read.__name__}, but {error!r}"))
    often = Counter(entry.title for entry in known)
    return [
        replace(entry, title=f"{entry.title} ({entry.path.stem})") if often[entry.title] > 1 else entry
        for entry in known
    ], rest


def shown(kind: Kind, file: Other) -> Measured:
    data, lines = file.data, tuple(kind.read(file.data))
    column, cell = kind.judged
    verdicts = Counter(line["verdict"] for line in lines if line[column] == cell)
    hardware, versions = data["hardware"], data["versions"]
    machine = str(hardware.get("gpu") or f"{hardware['device']}, {hardware.get('threads', '?')} threads")
    stopped = "" if data.get("finished", True) else " It was stopped before its end: these are its first rows."
    return Measured(
        key=f"measured-{slug(file.path.with_suffix('').as_posix()) or 'file'}",
        title=kind.title,
        sentence="RepL against E2E: " + ", ".join(f"{word} in {count}" for word, count in verdicts.items()),
        about=kind.about + stopped,
        kind=kind,
        lines=lines,
        path=file.path,
        made_on=", ".join([machine, *(f"{name} {number}" for name, number in versions.items())]),
        command=str(data.get("command", "")),
    )


def entries(measured: Sequence[Measured], opened: bool) -> Iterator[Entry]:
    for found in measured:
        made = columns({head: [line[head] for line in found.lines] for head in found.lines[0]}, found.title)
        count = len(found.lines)
        parts = [
            tag("p", found.about, class_="quiet"),
            fold(f"Every number ({count} rows)", made) if count > MOST_LINES else made,
            *([tag("p", command(found.command))] if found.command else []),
            tag("p", f"Measured on {found.made_on}. File: {found.path.as_posix()}", class_="quiet"),
        ]
        yield folded(found.key, found.title, found.path.as_posix(), found.sentence, *parts, opened=opened)
