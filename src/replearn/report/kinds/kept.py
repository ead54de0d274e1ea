"""Accuracy kept when blocks of a trained model are replaced and not trained (`kept_after_replacement.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dots import Case, Dot, dot_figure
from ..measured import Found, Table, columns
from ..scene import Drawing


def claims(data: Mapping[str, Any]) -> bool:
    return str(data.get("script", "")).endswith("kept_after_replacement.py")


def show(data: Mapping[str, Any], key: str) -> Found:
    trained, rows = data["trained_accuracy"], data["rows"]
    images = images_of(data)
    chosen = [row for row in rows if row["calibration_images"] == images]
    gone = [row["accuracy"] for row in chosen if row["operator"] == "removal"]
    fitted = [row["accuracy"] for row in chosen if row["operator"] != "removal"]
    tables = [table_of(chosen, f"With {images:,} calibration images")]
    others = [row for row in rows if row["calibration_images"] != images]
    if others:
        counted = {row["calibration_images"] for row in others}
        several = [row for row in rows if any(alike(row, other) for other in others)]
        title = f"With {min(counted):,} to {max(counted):,} calibration images"
        tables.append(table_of(several, title))
    name = data.get("model") or ", ".join(str(data["arguments"].get(word, "")) for word in ("recipe", "data"))
    return Found(
        title=f"Accuracy kept after replacement, with no training: {name}",
        sentence=f"{trained:.2f} % trained; removal keeps {span(gone)} %, the {len(fitted)} fitted forms "
        f"{span(fitted)} %",
        about="Accuracy on the test set. Unexplained: the share of the residual branches that the fitted "
        "operators leave, from the first target to the last.",
        tables=tuple(tables),
        figures=(figure(chosen, trained, key),),
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


def table_of(rows: list[Mapping[str, Any]], title: str) -> Table:
    counts = {row["calibration_images"] for row in rows}
    return columns(
        {
            "placement": [placement(row) for row in rows],
            "operator": [row["operator"] for row in rows],
            "images": [f"{row['calibration_images']:,}" if len(counts) > 1 else "" for row in rows],
            "accuracy, %": [f"{row['accuracy']:.2f}" for row in rows],
            "deployed": [f"{row['deployed_accuracy']:.2f}" for row in rows],
            "unexplained": [", ".join(f"{share:.2f}" for share in row["unexplained"]) for row in rows],
            "parameters": [f"{row['parameters']:,}" for row in rows],
            "fitted in s": [f"{row['seconds']:.2f}" for row in rows],
        },
        left=("placement", "operator", "unexplained"),
        title=title,
    )


def figure(rows: list[Mapping[str, Any]], trained: float, key: str) -> Drawing:
    cases: list[Case] = []
    for name in dict.fromkeys(placement(row) for row in rows):
        cases.append(Case(label=name))
        for row in (row for row in rows if placement(row) == name):
            tip = f"{row['operator']}\n{name}\n{row['accuracy']:.2f} % of {trained:.2f} %"
            role = "removal" if row["operator"] == "removal" else "repl"
            dot = Dot(value=row["accuracy"], role=role, tip=tip)
            cases.append(Case(label=row["operator"], dots=(dot,)))
    return dot_figure(
        cases,
        name=f"{key}-accuracy",
        title="Accuracy kept",
        about="accuracy with blocks replaced and no training; the rule is the trained model.",
        x_title="test accuracy, %",
        legend=[("removal", "removal", False), ("repl", "an operator, fitted", False)],
        rule=(trained, "trained"),
    )
