"""Predicted ratios beside a record's measured ones (`benchmarks/promise_of_steps.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dots import Case, Dot, dot_figure
from ..measured import Found, columns

ROLES = {"removal": "removal", "RepL": "repl"}


def claims(data: Mapping[str, Any]) -> bool:
    return str(data.get("script", "")).endswith("promise_of_steps.py")


def show(data: Mapping[str, Any], key: str) -> Found:
    rows = [row for row in data["rows"] if row["candidate"] != "E2E"]
    table = columns(
        {
            "model": [row["model"] for row in rows],
            "backend": [row["backend"] for row in rows],
            "candidate": [row["candidate"] for row in rows],
            "time: predicted": [f"{row['time']['predicted']:.3f}" for row in rows],
            "time: measured": [f"{row['time']['measured']:.3f}" for row in rows],
            "memory: predicted": [f"{row['memory']['predicted']:.3f}" for row in rows],
            "memory: measured": [f"{row['memory']['measured']:.3f}" for row in rows],
        },
        left=("model", "backend", "candidate"),
    )
    cases: list[Case] = []
    for name in dict.fromkeys((row["model"], row["backend"]) for row in rows):
        cases.append(Case(label=", ".join(name)))
        for row in (row for row in rows if (row["model"], row["backend"]) == name):
            off = row["time"]["predicted"] / row["time"]["measured"]
            tip = (
                f"{row['model']}, {row['backend']}, {row['candidate']}\npredicted / measured time ratio {off:.3f}"
            )
            dot = Dot(value=off, role=ROLES.get(row["candidate"], "series0"), tip=tip)
            cases.append(Case(label=row["candidate"], dots=(dot,)))
    figure = dot_figure(
        cases,
        name=f"{key}-time",
        title="Predicted over measured time ratios",
        about="the time ratio to E2E as predicted over the one that was measured; at the rule both agree.",
        x_title="predicted / measured time ratio",
        legend=[("removal", "removal", False), ("repl", "RepL", False)],
        rule=(1.0, "agree"),
    )
    worst = {what: max(abs(row[what]["predicted"] - row[what]["measured"]) for row in rows) for what in WHAT}
    return Found(
        title=f"Predicted and measured training steps: {data['record']}",
        sentence=f"ratios to E2E are off by at most {worst['time']:.3f} in time and {worst['memory']:.3f} "
        "in memory",
        about="Ratios to E2E. Predictions are made from shapes alone, for the GPU by its name.",
        command="python benchmarks/promise_of_steps.py RECORD --out FILE",
        tables=(table,),
        figures=(figure,),
    )


WHAT = ("time", "memory")
