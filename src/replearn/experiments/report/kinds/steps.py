"""Training steps (`replearn bench steps`): time and memory of RepL and removal as ratios to E2E."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...bench.record import FORMAT
from ..dots import Case, Dot, dot_figure
from ..measured import Found, Table, columns, median
from . import epochs as whole_epochs

SHOWN = {"removal": ("removal", False), "RepL": ("repl", False), "RepL, recomputed": ("series0", False)}


def claims(data: Mapping[str, Any]) -> bool:
    return data.get("format") == FORMAT and bool(data.get("training"))


def show(data: Mapping[str, Any], key: str) -> Found:
    entries = data["training"]
    cases: list[Case] = []
    last = None
    for entry in entries:
        if entry["title"] != last:
            last = entry["title"]
            cases.append(Case(label=last))
        cases.append(Case(label=entry["backend"], dots=tuple(dots(entry))))
    tables = (short_table(entries), whole_table(entries))
    times = [row["time"]["median"] for entry in entries for row in entry["rows"] if row["label"] == "RepL"]
    best, worst = min(times), max(times)
    backends = ", ".join(dict.fromkeys(entry["backend"] for entry in entries))
    about = (
        "Time and memory are ratios to E2E in the same run, medians over rounds. Yield: what RepL saved of what "
    )
    about += "arithmetic allows. 'Weights given' and 'frozen' time the same network without synthesis."
    figure = dot_figure(
        cases,
        name=f"{key}-step",
        title="Time of a training step",
        about="time of a step as a ratio to E2E in the same run, with quartiles; left of the rule is faster.",
        x_title="time of a step, ratio to E2E",
        legend=[(role, label, hollow) for label, (role, hollow) in SHOWN.items() if any_of(entries, label)],
        rule=(1.0, "E2E"),
    )
    rest = whole_epochs.show(data, key) if data.get("epochs") else None  # a file may hold both
    return Found(
        title=f"Time and memory of a training step: {backends}",
        sentence=f"RepL takes {best:.2f} to {worst:.2f} of E2E's time over {len(times)} cases",
        about=about,
        tables=(*tables, *(rest.tables if rest else ())),
        figures=(figure, *(rest.figures if rest else ())),
        beside=rest.beside if rest else (),
    )


def short_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """A line a case and backend: what counts."""
    found = [({row["label"]: row for row in entry["rows"]}, entry) for entry in entries]

    def shares(label: str, what: Callable[[Mapping[str, Any]], float | None]) -> list[str]:
        values = [what(rows[label]) if label in rows else None for rows, _ in found]
        return ["" if value is None else f"{value:.3f}" for value in values]

    return columns(
        {
            "case": [entry["title"] for entry in entries],
            "backend": [entry["backend"] for entry in entries],
            "removal: time": shares("removal", lambda row: row["time"]["median"]),
            "RepL: time": shares("RepL", lambda row: row["time"]["median"]),
            "yield": ["" if entry["yield_"] is None else f"{entry['yield_']:.2f}" for entry in entries],
            "removal: memory": shares("removal", lambda row: row["memory_ratio"]),
            "RepL: memory": shares("RepL", lambda row: row["memory_ratio"]),
        },
        left=("case", "backend"),
    )


def whole_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    pairs = [(entry, row) for entry in entries for row in entry["rows"]]
    table = columns(
        {
            "case": [entry["title"] for entry, _ in pairs],
            "backend": [entry["backend"] for entry, _ in pairs],
            "candidate": [row["label"] for _, row in pairs],
            "ms a step": [f"{median(row['timing']['milliseconds']):.2f}" for _, row in pairs],
            "time": [f"{row['time']['median']:.3f}" for _, row in pairs],
            "quartiles": [f"{row['time']['low']:.3f}-{row['time']['high']:.3f}" for _, row in pairs],
            "memory": ["" if row["memory_ratio"] is None else f"{row['memory_ratio']:.3f}" for _, row in pairs],
            "GB": ["" if row["memory"] is None else f"{row['memory'] / 1e9:.2f}" for _, row in pairs],
            "parameters": [f"{row['parameters']:,}" for _, row in pairs],
        },
        left=("case", "backend", "candidate"),
        title="Every candidate",
    )
    return replace(table, folded=True)


def dots(entry: Mapping[str, Any]) -> list[Dot]:
    found = []
    for row in entry["rows"]:
        if row["label"] not in SHOWN:
            continue
        role, hollow = SHOWN[row["label"]]
        time = row["time"]
        tip = f"{row['label']}, {entry['backend']}\n{entry['title']}\ntime {time['median']:.3f} "
        tip += f"({time['low']:.3f} to {time['high']:.3f}) of E2E"
        if row["memory_ratio"] is not None:
            tip += f"\nmemory {row['memory_ratio']:.3f} of E2E"
        found.append(
            Dot(value=time["median"], low=time["low"], high=time["high"], role=role, hollow=hollow, tip=tip)
        )
    return found


def any_of(entries: Any, label: str) -> bool:
    return any(row["label"] == label for entry in entries for row in entry["rows"])
