"""What is kept when blocks of a trained model are replaced and not trained (`kept_after_replacement.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dots import Case, Dot, dot_figure
from ..measured import Found, Table, columns
from ..scene import Drawing


def claims(data: Mapping[str, Any]) -> bool:
    return str(data.get("script", "")).endswith("kept_after_replacement.py")


def show(data: Mapping[str, Any], key: str) -> Found:
    metric, unit = data.get("metric", "accuracy"), data.get("samples", "images")
    trained, images = data[f"trained_{metric}"], images_of(data)
    # one name for what differs between tasks, so that the rest need not ask
    rows = [
        {
            **row,
            "kept": row[metric],
            "deployed": row[f"deployed_{metric}"],
            "samples": row[f"calibration_{unit}"],
        }
        for row in data["rows"]
    ]
    shown = "accuracy, %" if metric == "accuracy" else metric
    mark = " %" if metric == "accuracy" else ""
    chosen = [row for row in rows if row["samples"] == images]
    gone = [row["kept"] for row in chosen if row["operator"] == "removal"]
    fitted = [row["kept"] for row in chosen if row["operator"] != "removal"]
    tables = [table_of(chosen, f"With {images:,} calibration {unit}", shown, unit)]
    others = [row for row in rows if row["samples"] != images]
    if others:
        counted = {row["samples"] for row in others}
        several = [row for row in rows if any(alike(row, other) for other in others)]
        title = f"With {min(counted):,} to {max(counted):,} calibration {unit}"
        tables.append(table_of(several, title, shown, unit))
    name = data.get("model") or ", ".join(str(data["arguments"].get(word, "")) for word in ("recipe", "data"))
    return Found(
        title=f"{metric.capitalize()} kept after replacement, with no training: {name}",
        sentence=f"{trained:.2f}{mark} trained; removal keeps {span(gone)}{mark}, the {len(fitted)} fitted forms "
        f"{span(fitted)}{mark}",
        about=f"{metric.capitalize()} on the test set. Unexplained: the share of the residual branches that the "
        "fitted operators leave, from the first target to the last.",
        tables=tuple(tables),
        figures=(figure(chosen, trained, key, metric),),
    )


def images_of(data: Mapping[str, Any]) -> int:
    held = data["arguments"]["images"]
    return int(held[0] if isinstance(held, list) else held)


def span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else "nothing"


def alike(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(row[field] == other[field] for field in ("interval", "first", "operator"))


def placement(row: Mapping[str, Any]) -> str:
    return f"K={row['interval']}, first={row['first']}: {row['targets']} blocks"


def table_of(rows: list[dict[str, Any]], title: str, shown: str, unit: str) -> Table:
    counts = {row["samples"] for row in rows}
    return columns(
        {
            "placement": [placement(row) for row in rows],
            "operator": [row["operator"] for row in rows],
            unit: [f"{row['samples']:,}" if len(counts) > 1 else "" for row in rows],
            shown: [f"{row['kept']:.2f}" for row in rows],
            "deployed": [f"{row['deployed']:.2f}" for row in rows],
            "unexplained": [", ".join(f"{share:.2f}" for share in row["unexplained"]) for row in rows],
            "parameters": [f"{row['parameters']:,}" for row in rows],
            "fitted in s": [f"{row['seconds']:.2f}" for row in rows],
        },
        left=("placement", "operator", "unexplained"),
        title=title,
    )


def figure(rows: list[dict[str, Any]], trained: float, key: str, metric: str) -> Drawing:
    cases: list[Case] = []
    for name in dict.fromkeys(placement(row) for row in rows):
        cases.append(Case(label=name))
        for row in (row for row in rows if placement(row) == name):
            tip = f"{row['operator']}\n{name}\n{row['kept']:.2f} of {trained:.2f}"
            role = "removal" if row["operator"] == "removal" else "repl"
            dot = Dot(value=row["kept"], role=role, tip=tip)
            cases.append(Case(label=row["operator"], dots=(dot,)))
    return dot_figure(
        cases,
        name=f"{key}-{metric}",
        title=f"{metric.capitalize()} kept",
        about=f"{metric} with blocks replaced and no training; the rule is the trained model.",
        x_title="test accuracy, %" if metric == "accuracy" else f"test {metric}, lower is better",
        legend=[("removal", "removal", False), ("repl", "an operator, fitted", False)],
        rule=(trained, "trained"),
    )
