"""What is kept when blocks of a trained model are replaced and not trained (`kept_after_replacement.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..chart import Case, Dot, dot_figure, grouped
from . import Column, Found, Row, span, table_of


def claims(data: Mapping[str, Any]) -> bool:
    return str(data.get("script", "")).endswith("kept_after_replacement.py")


def show(data: Mapping[str, Any], key: str) -> Found:
    metric, unit = data.get("metric", "accuracy"), data.get("samples", "images")
    percent = metric == "accuracy"
    trained, asked, count = data[f"trained_{metric}"], data["arguments"]["images"], f"calibration_{unit}"
    images = int(asked[0] if isinstance(asked, list) else asked)
    columns: dict[str, Column] = {
        "placement": placement,
        "operator": "operator",
        unit: f"{count}:,",
        "accuracy, %" if percent else metric: f"{metric}:.2f",
        "deployed": f"deployed_{metric}:.2f",
        "unexplained": lambda row: ", ".join(f"{share:.2f}" for share in row["unexplained"]),
        "parameters": "parameters:,",
        "fitted in s": "seconds:.2f",
    }
    chosen = [row for row in data["rows"] if row[count] == images]
    tables = [table_of(chosen, {**columns, unit: lambda _: ""}, f"With {images:,} calibration {unit}")]
    if others := [row for row in data["rows"] if row[count] != images]:
        several = [row for row in data["rows"] if form(row) in map(form, others)]
        counts = span([row[count] for row in others], ",")
        tables.append(table_of(several, columns, f"With {counts} calibration {unit}"))

    def case(row: Row) -> Case:
        role = "removal" if row["operator"] == "removal" else "repl"
        tip = f"{row['operator']}\n{placement(row)}\n{row[metric]:.2f} of {trained:.2f}"
        return Case(label=row["operator"], dots=(Dot(value=row[metric], role=role, tip=tip),))

    figure = dot_figure(
        grouped(chosen, placement, case),
        name=f"{key}-{metric}",
        title=f"{metric.capitalize()} kept",
        about=f"{metric} with blocks replaced and no training; the rule is the trained model.",
        x_title="test accuracy, %" if percent else f"test {metric}, lower is better",
        legend_of=[("removal", "removal", "dot"), ("repl", "an operator, fitted", "dot")],
        rule=(trained, "trained"),
    )
    mark = " %" if percent else ""
    gone = [row[metric] for row in chosen if row["operator"] == "removal"]
    fitted = [row[metric] for row in chosen if row["operator"] != "removal"]
    name = data.get("model") or ", ".join(str(data["arguments"].get(word, "")) for word in ("recipe", "data"))
    return Found(
        title=f"{metric.capitalize()} kept after replacement, with no training: {name}",
        sentence=f"{trained:.2f}{mark} trained; removal keeps {span(gone)}{mark}, the {len(fitted)} fitted forms "
        f"{span(fitted)}{mark}",
        about=f"{metric.capitalize()} on the test set. Unexplained: the share of the residual branches that the "
        "fitted operators leave, from the first target to the last.",
        tables=tuple(tables),
        figures=(figure,),
    )


def form(row: Row) -> tuple[Any, ...]:
    return row["interval"], row["first"], row["operator"]


def placement(row: Row) -> str:
    return f"K={row['interval']}, first={row['first']}: {row['targets']} blocks"
