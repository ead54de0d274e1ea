"""Training steps (`replearn bench steps`): time and memory of every candidate as ratios to E2E."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from ...bench.record import FORMAT
from ..chart import Case, Dot, grouped
from ..svg import series_roles
from . import Column, Found, Row, ratio_figure, span, table_of


def milliseconds(entry: Row) -> str:
    return f"{median(entry['by']['E2E']['timing']['milliseconds']):.2f}"


def claims(data: Mapping[str, Any]) -> bool:
    return data.get("format") == FORMAT and bool(data.get("training"))


def show(data: Mapping[str, Any], key: str) -> Found:
    entries = [{**entry, "by": {row["label"]: row for row in entry["rows"]}} for entry in data["training"]]
    found = dict.fromkeys(label for entry in entries for label in entry["by"])
    labels = [label for label in found if label != "E2E" and not label.startswith("RepL, weights")]
    roles = dict(zip(labels, series_roles([label.lower() for label in labels]), strict=True))
    columns: dict[str, Column] = {"case": "title", "backend": "backend", "E2E, ms": milliseconds}
    for what, path in (("time", "time.median"), ("memory", "memory_ratio")):
        columns |= {f"{label}: {what}": f"by.{label}.{path}:.3f" for label in labels}

    def case(entry: Row) -> Case:
        rows = [(entry["by"][label], role) for label, role in roles.items() if label in entry["by"]]
        tip = f"{entry['title']}, {entry['backend']}"
        dots = tuple(Dot.of(row["time"], role, f"{row['label']}\n{tip}") for row, role in rows)
        return Case(label=entry["backend"], dots=dots)

    cases = grouped(entries, lambda entry: str(entry["title"]), case)
    legend = [(role, label, "dot") for label, role in roles.items()]
    times = [entry["by"]["RepL"]["time"]["median"] for entry in entries if "RepL" in entry["by"]]
    return Found(
        title="Time and memory of a training step: " + ", ".join(dict.fromkeys(e["backend"] for e in entries)),
        sentence=f"RepL takes {span(times)} of E2E's time over {len(times)} cases",
        about="Time and memory are ratios to E2E in the same run, medians over rounds. Yield: what RepL saved of "
        "what arithmetic allows.",
        tables=(table_of(entries, {**columns, "yield": "yield_:.2f"}),),
        figures=(ratio_figure(cases, key, "time of a step, ratio to E2E", legend),),
    )
