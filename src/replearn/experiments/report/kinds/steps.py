"""Training steps (`replearn bench steps`): time and memory of every candidate as ratios to E2E."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from ...bench.record import FORMAT
from ..chart import Case, Dot, dot_figure, grouped
from . import Column, Found, Row, span, table_of

SHOWN = {"removal": "removal", "RepL": "repl"}
HIDDEN = ("E2E", "RepL, weights given", "RepL, weights frozen")  # what a reader compares with, and what only we do


def claims(data: Mapping[str, Any]) -> bool:
    return data.get("format") == FORMAT and bool(data.get("training"))


def show(data: Mapping[str, Any], key: str) -> Found:
    entries = [{**entry, "by": {row["label"]: row for row in entry["rows"]}} for entry in data["training"]]
    labels = list(dict.fromkeys(label for entry in entries for label in entry["by"]))
    shown = [label for label in labels if label not in HIDDEN]
    roles = {label: SHOWN.get(label, f"series{number % 8}") for number, label in enumerate(shown)}
    short: dict[str, Column] = {"case": "title", "backend": "backend"}
    for what, path in (("time", "time.median"), ("memory", "memory_ratio")):
        short |= {f"{label}: {what}": f"by.{label}.{path}:.3f" for label in shown}
    named = [({"case": entry["title"], "backend": entry["backend"]}, entry["rows"]) for entry in entries]
    pairs = [{**row, **names} for names, rows in named for row in rows]
    tables = (table_of(entries, {**short, "yield": "yield_:.2f"}), table_of(pairs, WHOLE, "Every candidate", True))
    figure = dot_figure(
        grouped(entries, lambda entry: str(entry["title"]), lambda entry: case(entry, roles)),
        name=f"{key}-step",
        title="Time of a training step",
        about="time of a step as a ratio to E2E in the same run, with quartiles; left of the rule is faster.",
        x_title="time of a step, ratio to E2E",
        legend_of=[(role, label, "dot") for label, role in roles.items()],
        rule=(1.0, "E2E"),
    )
    times = [entry["by"]["RepL"]["time"]["median"] for entry in entries if "RepL" in entry["by"]]
    return Found(
        title="Time and memory of a training step: " + ", ".join(dict.fromkeys(e["backend"] for e in entries)),
        sentence=f"RepL takes {span(times)} of E2E's time over {len(times)} cases",
        about="Time and memory are ratios to E2E in the same run, medians over rounds. Yield: what RepL saved of "
        "what arithmetic allows. 'Weights given' and 'frozen' time the same network without synthesis.",
        tables=tables,
        figures=(figure,),
    )


WHOLE: dict[str, Column] = {
    "case": "case",
    "backend": "backend",
    "candidate": "label",
    "ms a step": lambda row: f"{median(row['timing']['milliseconds']):.2f}",
    "time": "time.median:.3f",
    "quartiles": lambda row: f"{row['time']['low']:.3f}-{row['time']['high']:.3f}",
    "memory": "memory_ratio:.3f",
    "GB": lambda row: "" if row["memory"] is None else f"{row['memory'] / 1e9:.2f}",
    "parameters": "parameters:,",
}


def case(entry: Row, roles: Mapping[str, str]) -> Case:
    dots = []
    for label, role in roles.items():
        if (row := entry["by"].get(label)) is not None:
            time = row["time"]
            tip = f"{label}, {entry['backend']}\n{entry['title']}\ntime {time['median']:.3f} "
            tip += f"({time['low']:.3f} to {time['high']:.3f}) of E2E"
            tip += "" if row["memory_ratio"] is None else f"\nmemory {row['memory_ratio']:.3f} of E2E"
            dots.append(Dot.of(time, role, tip))
    return Case(label=entry["backend"], dots=tuple(dots))
