"""The kinds of benchmark files that a report shows: `kind_of` finds the function that shows a file's data.

It gets the data and a key, which the names of its figures begin with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ..bench import inference as serving
from ..bench.record import FORMAT as RECORD
from ..training.compare import paper_ratio
from ..training.recipe import paper_row_from_dict
from .chart import Case, Dot, Sign, dot_figure, grouped
from .svg import Drawing, series_roles

Row = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Any], str]]
Cost = tuple[float | None, float | None]  # time and memory as ratios to E2E
GAIN = "RepL deployed against E2E"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One file, shown; `measured_in` adds where it lies, on what it was measured and by which command."""

    title: str  # unique in a report
    sentence: str  # what it comes to, in one line
    about: str  # how to read the tables
    tables: tuple[tuple[str, Mapping[str, Sequence[str]]], ...]  # a title and columns
    figures: tuple[Drawing, ...]
    costs: Mapping[tuple[str, str, str], Cost] = field(default_factory=dict)  # by recipe, data and label
    command: str = ""
    key: str = ""
    path: Path = Path()
    made_on: str = ""


def kind_of(data: Mapping[str, Any]) -> Callable[[Mapping[str, Any], str], Measured] | None:
    form, rows = data.get("format"), data.get("rows")
    if form == serving.FORMAT:
        return inference
    if form == RECORD and (data.get("training") or data.get("epochs")):
        return steps if data.get("training") else epochs
    if rows and isinstance(rows, list) and all(isinstance(row, dict) and "int8_speedup" in row for row in rows):
        return int8
    return None


def columns_of(rows: Sequence[Row], columns: Columns) -> dict[str, list[str]]:
    """Each column by a function of a row, or by a field's path and format (`time.median:.3f`)."""
    return {
        head: [cell(row, column) if isinstance(column, str) else column(row) for row in rows]
        for head, column in columns.items()
    }


def cell(row: Row, column: str) -> str:
    path, _, form = column.partition(":")
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return "" if value is None else format(value, form)


def ratio_figure(cases: Sequence[Case], key: str, what: str, signs: Sequence[Sign], base: str = "E2E") -> Drawing:
    """Ratios to a base, which is the rule at 1, with their quartiles."""
    title, about = what.partition(",")[0].capitalize(), f"{what}; the rule is {base}."
    about += " Dashed rings are the paper's." if any(sign == "ring" for *_, sign in signs) else ""
    shown: dict[str, Any] = {"title": title, "about": about, "x_title": what, "legend_of": signs}
    return dot_figure(cases, name=f"{key}-ratio", rule=(1.0, base), **shown)


def span(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else "nothing"


def steps(data: Mapping[str, Any], key: str) -> Measured:
    """Training steps (`replearn bench steps`): time and memory of every candidate as ratios to E2E."""
    entries = [{**entry, "by": {row["label"]: row for row in entry["rows"]}} for entry in data["training"]]
    found = dict.fromkeys(label for entry in entries for label in entry["by"])
    labels = [label for label in found if label != "E2E" and not label.startswith("RepL, weights")]
    roles = dict(zip(labels, series_roles([label.lower() for label in labels]), strict=True))

    def milliseconds(entry: Row) -> str:
        return f"{median(entry['by']['E2E']['timing']['milliseconds']):.2f}"

    def case(entry: Row) -> Case:
        rows = [(entry["by"][label], role) for label, role in roles.items() if label in entry["by"]]
        tip = f"{entry['title']}, {entry['backend']}"
        dots = tuple(Dot.of(row["time"], role, f"{row['label']}\n{tip}") for row, role in rows)
        return Case(label=entry["backend"], dots=dots)

    columns: dict[str, Any] = {"case": "title", "backend": "backend", "E2E, ms": milliseconds}
    for what, path in (("time", "time.median"), ("memory", "memory_ratio")):
        columns |= {f"{label}: {what}": f"by.{label}.{path}:.3f" for label in labels}
    cases = grouped(entries, lambda entry: str(entry["title"]), case)
    signs = [(role, label, "dot") for label, role in roles.items()]
    times = [entry["by"]["RepL"]["time"]["median"] for entry in entries if "RepL" in entry["by"]]
    return Measured(
        title="Time and memory of a training step: " + ", ".join(dict.fromkeys(e["backend"] for e in entries)),
        sentence=f"RepL takes {span(times)} of E2E's time over {len(times)} cases",
        about="Time and memory are ratios to E2E in the same run, medians over rounds. Yield: what RepL saved of "
        "what arithmetic allows.",
        tables=(("", columns_of(entries, {**columns, "yield": "yield_:.2f"})),),
        figures=(ratio_figure(cases, key, "time of a step, ratio to E2E", signs),),
    )


EPOCHS: Columns = {
    "run": "name",
    "s an epoch": "seconds:.3f",
    "time ratio": "time.median:.3f",
    "paper time": "paper_time:.3f",
    "samples/s in all": "images_per_second_in_all:,.0f",
    "GB": "gigabytes:.2f",
    "memory ratio": "memory_ratio:.3f",
    "paper memory": "paper_memory:.3f",
    "notes": lambda row: "; ".join(row["notes"]),
}


def epochs(data: Mapping[str, Any], key: str) -> Measured:
    """Whole epochs (`benchmarks/epochs.py`): seconds, throughput and memory, with the paper's ratios."""
    tables, cases, told = [], [], []
    costs: dict[tuple[str, str, str], Cost] = {}
    for entry in data["epochs"]:
        recipe, rows = entry["recipe"], []
        papers = {
            row["label"]: paper_row_from_dict(row)
            for row in recipe.get("paper", ())
            if row["data"] == entry["data"]
        }
        base = next((row["memory"] for row in entry["rows"] if row["label"] == "E2E"), None)
        roles = series_roles([row["label"].lower().partition(" ")[0] for row in entry["rows"]])
        cases.append(Case(label=entry["title"]))
        for row, role in zip(entry["rows"], roles, strict=True):
            label, time, printed = row["label"], row["time"]["median"], papers.get(row["label"])
            memory = row["memory"] / base if base and row["memory"] else None
            name = label if row["runs"] == 1 else f"{label}, {row['runs']} at once"
            paper = paper_ratio(printed, papers.get("E2E"), "seconds_per_epoch")
            derived = {
                "name": name,
                "seconds": median(row["timing"]["milliseconds"]) / 1000,
                "gigabytes": row["memory"] / 1e9 if row["memory"] else None,
                "memory_ratio": memory,
                "paper_time": paper,
                "paper_memory": paper_ratio(printed, papers.get("E2E"), "memory_gb"),
            }
            rows.append({**row, **derived})
            dots = [Dot.of(row["time"], role, name)]
            dots += [Dot.printed(paper, role, f"{label} in the paper")] if paper else []
            cases.append(Case(label=name, dots=tuple(dots)))
            if row["runs"] == 1:
                costs[recipe["name"], entry["data"], label] = (time, memory)
                told += [f"{label} {time:.2f} of E2E's time"] if label.startswith("RepL") else []
        tables.append((entry["title"], columns_of(rows, EPOCHS)))
    signs = [("repl", "ours", "dot"), ("repl", "paper", "ring")]
    return Measured(
        title="Time of whole epochs: " + "; ".join(title.partition(":")[0] for title, _ in tables),
        sentence="; ".join(told),
        about="Times are ratios to E2E in the same run. The paper's are on its own hardware.",
        tables=tuple(tables),
        figures=(ratio_figure(cases, key, "time of an epoch, ratio to E2E", signs),),
        costs=costs,
    )


INFERENCE: Columns = {
    "model": "model",
    "blocks out": "targets",
    "backend": "backend",
    "batch": "batch",
    "E2E, ms": "milliseconds.E2E.median:.3f",
    "dynamic, ms": "milliseconds.RepL dynamic.median:.3f",
    "deployed, ms": "milliseconds.RepL deployed.median:.3f",
    "deployed against E2E": f"speedup.{GAIN}.median:.3f",
    "paper, against E2E": f"paper.{serving.PAPER_E2E}.speedup:.3f",
    "deployed against dynamic": "speedup.RepL deployed against RepL dynamic.median:.3f",
    "paper, against dynamic": f"paper.{serving.PAPER_DYNAMIC}.speedup:.3f",
}


def inference(data: Mapping[str, Any], key: str) -> Measured:
    """Inference latency (`replearn bench inference`): deployed against E2E and against the dynamic model."""
    rows = data["rows"]
    gains = [row["speedup"][GAIN]["median"] for row in rows]
    stopped = "" if data.get("finished", True) else " It was stopped before its end: these are its first rows."

    def case(row: Row) -> Case:
        name = f"{row['backend']}, batch {row['batch']}"
        dots = [Dot.of(row["speedup"][GAIN], "repl", f"{row['model']}, {name}")]
        if paper := row["paper"].get(serving.PAPER_E2E):
            dots.append(Dot.printed(paper["speedup"], "paper", f"{row['model']}, {name}, in the paper"))
        return Case(label=name, dots=tuple(dots))

    cases = grouped(rows, lambda row: str(row["model"]), case)
    signs = [("repl", "deployed RepL", "dot"), ("paper", "paper", "ring")]
    faster = f"faster in {sum(gain > 1 for gain in gains)} of {len(gains)} cases"
    return Measured(
        title="Inference latency",
        sentence=f"deployed is {span(gains)} times as fast as E2E, {faster}",
        about="Milliseconds a batch, medians; speedups are taken round by round, more than 1 is faster. Deployed: "
        f"BatchNorms folded and operators made into plain layers.{stopped}",
        tables=(("", columns_of(rows, INFERENCE)),),
        figures=(ratio_figure(cases, key, "speedup of the deployed model", signs),),
    )


INT8: Columns = {
    "model": "model",
    "method": "method",
    "INT8": "int8",
    "float32 top-1": "accuracy.float32.top1:.2f",
    "INT8 top-1": "accuracy.int8.top1:.2f",
    "float32, img/s": "images_per_second.float32:,.1f",
    "INT8, img/s": "images_per_second.int8:,.1f",
    "speedup": "int8_speedup.median:.3f",
    "paper, INT8 img/s": "paper.int8_images_per_second:,.0f",
}


def int8(data: Mapping[str, Any], key: str) -> Measured:
    """INT8 after deploy (`benchmarks/int8.py`): accuracy and speed on one CPU."""
    cases = []
    for row in data["rows"]:
        name, role = f"{row['model']}, {row['method']}", "e2e" if row["method"] == "E2E" else "repl"
        cases.append(Case(label=name, dots=(Dot.of(row["int8_speedup"], role, name),)))
    gains = span([row["int8_speedup"]["median"] for row in data["rows"]])
    signs = [("e2e", "E2E", "dot"), ("repl", "RepL", "dot")]
    return Measured(
        title="INT8 after deploy",
        sentence=f"INT8 is {gains} times as fast as float32 on the same CPU",
        about="Both sides are deployed and run on the same CPU, in turns; the paper compares a GPU with a CPU.",
        tables=(("", columns_of(data["rows"], INT8)),),
        figures=(ratio_figure(cases, key, "speedup of INT8", signs, "float32"),),
    )
