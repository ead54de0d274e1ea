"""Predicted beside measured (`benchmarks/predicted_memory.py`, `benchmarks/predicted_steps.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dots import Case, Dot, dot_figure
from ..measured import Found, columns

MEMORY, STEPS = "replearn-memory-promise-1", "replearn-promise-steps-1"
ROLES = {"E2E": "e2e", "e2e": "e2e", "removal": "removal", "RepL": "repl", "repl": "repl"}


def claims(data: Mapping[str, Any]) -> bool:
    return data.get("format") in (MEMORY, STEPS) and bool(data.get("rows"))


def show(data: Mapping[str, Any], key: str) -> Found:
    """Rows of both files as (model, setting, candidate, {what: (predicted, measured)}); the first is drawn."""
    if data["format"] == MEMORY:
        unit, rows = "GB", [row for row in data["rows"] if row["measured"]]
        found = [
            (row["model"], row["precision"], row["method"], {"peak memory": gigabytes(row, "peak_bytes")})
            for row in rows
        ]
        if not found:
            raise ValueError("nothing was measured: there was no GPU")
    else:
        unit, rows = "ratio to E2E", [row for row in data["rows"] if row["candidate"] != "E2E"]
        found = [
            (
                row["model"],
                row["backend"],
                row["candidate"],
                {what: pair(row[what]) for what in ("time", "memory")},
            )
            for row in rows
        ]
    names = list(found[0][3])
    table = columns(
        {
            "model": [model for model, *_ in found],
            "setting": [setting for _, setting, *_ in found],
            "method": [method for _, _, method, _ in found],
            **{
                f"{name}, {unit}: {side}": [f"{values[name][place]:.3f}" for *_, values in found]
                for name in names
                for place, side in enumerate(("predicted", "measured"))
            },
        },
        left=("model", "setting", "method"),
    )
    cases: list[Case] = []
    for group in dict.fromkeys((model, setting) for model, setting, *_ in found):
        cases.append(Case(label=", ".join(group)))
        for _, _, method, values in (row for row in found if row[:2] == group):
            predicted, measured = values[names[0]]
            tip = f"{', '.join(group)}, {method}\n{names[0]}: predicted {predicted:.3f}, measured {measured:.3f}"
            dot = Dot(value=predicted / measured, role=ROLES.get(method, "series0"), tip=tip)
            cases.append(Case(label=method, dots=(dot,)))
    figure = dot_figure(
        cases,
        name=f"{key}-{names[0].replace(' ', '-')}",
        title=f"Predicted over measured {names[0]}",
        about=f"{names[0]} as predicted over what was measured; at the rule both agree.",
        x_title=f"predicted / measured {names[0]}",
        legend=[("removal", "removal", False), ("repl", "RepL", False)],
        rule=(1.0, "agree"),
    )
    worst = {name: max(abs(row[3][name][0] / row[3][name][1] - 1) for row in found) for name in names}
    errors = " and ".join(f"{name} within {100 * worst[name]:.1f} %" for name in names)
    return Found(
        title=f"Predicted and measured {' and '.join(names)}",
        sentence=f"predicted {errors} in {len(found)} cases",
        about="replearn.costs.predict predicts from shapes alone, for the GPU by its name.",
        tables=(table,),
        figures=(figure,),
    )


def gigabytes(row: Mapping[str, Any], what: str) -> tuple[float, float]:
    return row["predicted"][what] / 1e9, row["measured"][what] / 1e9


def pair(held: Mapping[str, Any]) -> tuple[float, float]:
    return held["predicted"], held["measured"]
