"""Files of `replearn bench` and `replearn compress`: a table for each kind, with the lines of all its files.

A kind of file is a function that reads its data into lines; all else is the same for every kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from .. import recipes
from ..bench.inference import FORMAT as INFERENCE
from ..bench.record import FORMAT as STEPS
from ..training.compare import paper_ratio
from ..training.comparison_table import ratio, spread
from ..training.intervals import std_of
from .collecting import Other
from .markup import Entry, card, columns, counted, fold, tag

BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)
MOST, FEW = 5_000, 20  # lines of a table, and of one that needs no fold
COMPRESSED = "compress"  # what a file without a format is taken for
PARTS = {"training", "rows", "bare_removal"}  # a file of a known kind has one of them
Line = dict[str, str]  # of a table, by column


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    title: str
    about: str  # how to read the table
    read: Callable[[Mapping[str, Any]], Iterator[Line]]
    paper: Mapping[str, tuple[str, str]]  # what the paper has numbers of: the columns of ours and of the paper's


Measured = Mapping[Kind, Sequence[Line]]


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


def compressed(data: Mapping[str, Any]) -> Iterator[Line]:
    """Trained networks with blocks taken out: one of `replearn compress`, or means over a benchmark's draws."""
    rows = data["rows"] if "rows" in data else [*_of_one(data)]
    trained = {row.get("net_seed"): row["score"] for row in rows if "score" in row and "budget" not in row}
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if {"budget", "method"} <= row.keys():  # the others are trained networks and what was chosen for a method
            told = row["subject"], row["method"], row.get("blocks_out", row.get("out")), row["images"]
            groups[*map(str, told), row.get("metric", "accuracy")].append(row)
    for (network, method, out, images, metric), draws in groups.items():
        scores = [row["score"] for row in draws]
        yield {
            "network": network,
            "method": method,
            "blocks out": out,
            "score": spread(fmean(scores), std_of(scores)),
            "trained": f"{fmean(trained[row.get('net_seed')] for row in draws):.2f}",
            "metric": metric,
            "latency": _share(draws, "latency_ms", "latency_before_ms"),
            "parameters": _share(draws, "parameters", "parameters_before"),
            "samples": images,
            "draws": str(len(draws)),
        }


def _of_one(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rows of a compress.json, in the benchmark's form; without labels it has the agreement in percent."""
    drawn = data["curve"] or {"kept": "agreement", "points": [{"kept": 100.0}]}
    same = data["agreement"]["same"]  # None for a model that takes no decisions
    reached = drawn.get("chosen", {"kept": float("nan") if same is None else 100 * same})
    yield {"subject": data["model"], "score": drawn["points"][0]["kept"]}
    yield {
        "subject": data["model"],
        "method": f"replearn compress, {data['budget']}",
        "budget": data["budget"],
        "out": f"{len(data['removed'])} of {data['num_blocks']}",
        "images": data["num_samples"],
        "metric": drawn["kept"],
        "score": reached["kept"],
        **{key: data["after"][part] for part, key in (("latency", "latency_ms"), ("parameters", "parameters"))},
        **{
            f"{part}_before{unit}": data["before"][part] for part, unit in (("latency", "_ms"), ("parameters", ""))
        },
    }


def _share(rows: Sequence[Mapping[str, Any]], after: str, before: str) -> str:
    return ratio(fmean(row[after] / row[before] for row in rows)) if before in rows[0] else ""


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
        paper={f"{each} of a training step": (each, f"paper: {each}") for each in ("time", "memory")},
    ),
    INFERENCE: Kind(
        title="Inference of the deployed model",
        about="How many times as fast as E2E, or as the model before deploying, with quartiles over rounds.",
        read=inference,
        paper={"speed of the deployed model": ("speedup", "paper")},
    ),
    COMPRESSED: Kind(
        title="Networks with blocks taken out",
        about="Without training; latency and parameters are shares of the trained network's.",
        read=compressed,
        paper={},
    ),
}


def measured_in(others: Sequence[Other]) -> tuple[Measured, list[tuple[Path, str]]]:
    """The lines of every kind, with their files, and the paths of all other files with the reason."""
    known: dict[Kind, list[Line]] = defaultdict(list)
    rest: list[tuple[Path, str]] = []
    for other in others:
        data = other.data if isinstance(other.data, dict) else {}
        kind = KINDS.get(str(data.get("format", COMPRESSED))) if PARTS & data.keys() else None
        if kind is None:
            rest.append((other.path, "measurements of a kind that a report does not show"))
            continue
        stopped = "" if data.get("finished", True) else ", stopped before its end"
        try:
            lines = [{**line, "file": f"{other.path.as_posix()}{stopped}"} for line in kind.read(data)]
            if not all(isinstance(cell, str) for line in lines for cell in line.values()):
                raise TypeError("a name in it is no text")
            known[kind] += lines
            if not lines:
                rest.append((other.path, "measurements of nothing that a report shows"))
        except BROKEN as error:
            rest.append((other.path, f"looks like {kind.read.__name__}, but {error!r}"))
    return {kind: lines for kind, lines in known.items() if lines}, rest


def entries(measured: Measured) -> Iterator[Entry]:
    tables = []
    for kind, lines in measured.items():
        made = columns({head: [line[head] for line in lines[:MOST]] for head in lines[0]}, kind.title)
        title = f"{kind.title} ({counted(len(lines), 'row')})"
        tables.append(fold(title, tag("p", kind.about), made, open_=len(lines) < FEW))
    if tables:
        yield card("benchmarks", "Measurements", *tables)
