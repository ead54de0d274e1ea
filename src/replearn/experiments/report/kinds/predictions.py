"""Predicted beside measured (`benchmarks/predicted_memory.py`, `benchmarks/predicted_steps.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..chart import Case, Dot, dot_figure, grouped
from . import Found, Row, table_of

MEMORY, STEPS = "replearn-memory-promise-1", "replearn-promise-steps-1"
ROLES = {"E2E": "e2e", "e2e": "e2e", "removal": "removal", "RepL": "repl", "repl": "repl"}


def claims(data: Mapping[str, Any]) -> bool:
    return data.get("format") in (MEMORY, STEPS) and bool(data.get("rows"))


def show(data: Mapping[str, Any], key: str) -> Found:
    """Both files as rows of one form; the first of what was predicted is drawn."""
    rows, said = data["rows"], ("predicted", "measured")
    if data["format"] == MEMORY:
        unit, names = "GB", ["peak memory"]
        rows = [
            {**row, "setting": row["precision"], names[0]: {side: row[side]["peak_bytes"] / 1e9 for side in said}}
            for row in rows
            if row["measured"]
        ]
    else:
        unit, names = "ratio to E2E", ["time", "memory"]
        rows = [{**row, "setting": row["backend"], "method": row["candidate"]} for row in rows]
        rows = [row for row in rows if row["method"] != "E2E"]
    if not rows:
        raise ValueError("nothing was measured: there was no GPU")
    sides = {f"{name}, {unit}: {side}": f"{name}.{side}:.3f" for name in names for side in said}
    table = table_of(rows, {"model": "model", "setting": "setting", "method": "method", **sides})
    first = names[0]

    def group(row: Row) -> str:
        return f"{row['model']}, {row['setting']}"

    def case(row: Row) -> Case:
        before, real = (row[first][side] for side in said)
        tip = f"{group(row)}, {row['method']}\n{first}: predicted {before:.3f}, measured {real:.3f}"
        dot = Dot(value=before / real, role=ROLES.get(row["method"], "series0"), tip=tip)
        return Case(label=row["method"], dots=(dot,))

    figure = dot_figure(
        grouped(rows, group, case),
        name=f"{key}-{first.replace(' ', '-')}",
        title=f"Predicted over measured {first}",
        about=f"{first} as predicted over what was measured; at the rule both agree.",
        x_title=f"predicted / measured {first}",
        legend_of=[("removal", "removal", "dot"), ("repl", "RepL", "dot")],
        rule=(1.0, "agree"),
    )
    worst = {name: max(abs(row[name]["predicted"] / row[name]["measured"] - 1) for row in rows) for name in names}
    errors = " and ".join(f"{name} within {100 * worst[name]:.1f} %" for name in names)
    return Found(
        title=f"Predicted and measured {' and '.join(names)}",
        sentence=f"predicted {errors} in {len(rows)} cases",
        about="replearn.costs.predict predicts from shapes alone, for the GPU by its name.",
        tables=(table,),
        figures=(figure,),
    )
