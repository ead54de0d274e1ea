"""Training steps (`replearn bench steps`): time and memory of RepL and removal as ratios to E2E."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...bench.record import FORMAT
from ..dots import Case, Dot, dot_figure
from ..measured import Found, columns, median
from . import epochs as whole_epochs

SHOWN = {"removal": ("removal", False), "RepL": ("repl", False), "RepL, recomputed": ("series0", False)}


def claims(data: Mapping[str, Any]) -> bool:
    return data.get("format") == FORMAT and bool(data.get("training"))


def show(data: Mapping[str, Any], key: str) -> Found:
    entries = data["training"]
    tables, cases, last = [], [], None
    for entry in entries:
        if entry["title"] != last:
            last = entry["title"]
            cases.append(Case(label=last))
        cases.append(Case(label=entry["backend"], dots=tuple(dots(entry))))
    lines: list[dict[str, str]] = []
    for entry in entries:
        for row in entry["rows"]:
            ours = row["label"] == "RepL"
            lines.append(
                {
                    "case": entry["title"],
                    "backend": entry["backend"],
                    "candidate": row["label"],
                    "ms a step": f"{median(row['timing']['milliseconds']):.2f}",
                    "time": f"{row['time']['median']:.3f}",
                    "quartiles": f"{row['time']['low']:.3f}-{row['time']['high']:.3f}",
                    "memory": "" if row["memory_ratio"] is None else f"{row['memory_ratio']:.3f}",
                    "GB": "" if row["memory"] is None else f"{row['memory'] / 1e9:.2f}",
                    "yield": f"{entry['yield_']:.2f}" if ours and entry["yield_"] is not None else "",
                    "parameters": f"{row['parameters']:,}",
                }
            )
    heads = list(lines[0])
    cells = {head: [line[head] for line in lines] for head in heads}
    tables.append(columns(cells, left=("case", "backend", "candidate")))
    times = [row["time"]["median"] for entry in entries for row in entry["rows"] if row["label"] == "RepL"]
    best, worst = min(times), max(times)
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
        title="Time and memory of a training step",
        sentence=f"RepL takes {best:.2f} to {worst:.2f} of E2E's time over {len(times)} cases",
        about=about,
        tables=(*tables, *(rest.tables if rest else ())),
        figures=(figure, *(rest.figures if rest else ())),
        beside=rest.beside if rest else (),
    )


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
