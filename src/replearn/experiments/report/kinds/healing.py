"""Healing after replacement (`benchmarks/heal_after_replacement.py`): at once, and after a short training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..chart import Case, Dot, dot_figure, grouped
from . import Found, Row, cell, span, table_of


def claims(data: Mapping[str, Any]) -> bool:
    return str(data.get("script", "")).endswith("heal_after_replacement.py")


def show(data: Mapping[str, Any], key: str) -> Found:
    metric, trained, rows = str(data["metric"]), float(data["trained"]), data["rows"]
    table = table_of(
        rows,
        {
            "placement": placement,
            "blocks out": lambda row: f"{row['targets']} of {row['blocks']}" if "blocks" in row else "",
            "in their place": "label",
            f"{metric} at once": "before:.2f",
            "healed": "healed:.2f",
            "fit, s": "fit_seconds:.1f",
            "heal, s": "heal_seconds:.1f",
            "parameters": "parameters:,",
        },
    )
    figure = dot_figure(
        grouped(rows, placement, case),
        name=f"{key}-{metric}",
        title="At once and healed",
        about=f"test {metric} right after replacing blocks (rings) and after healing (dots).",
        x_title=f"test {metric}",
        legend_of=[("removal", "at once", "ring"), ("repl", "healed", "dot")],
        rule=(trained, "trained"),
    )
    model = data.get("recipe", {}).get("model") or data["arguments"]["model"]
    changed = [row for row in rows if "before" in row]
    before, healed = (span([row[field] for row in changed]) for field in ("before", "healed"))
    better = "lower" if metric == "perplexity" else "higher"
    note = f" Note: {data['note']}." if data.get("note") else ""
    return Found(
        title=f"Healing after replacement: {model}",
        sentence=f"{metric} {trained:.2f} trained; {len(changed)} rows: {before} at once, {healed} healed",
        about=f"{metric}, {better} is better, on the test set: right after the replacement, and after a short "
        f"training of the whole network.{note}",
        tables=(table,),
        figures=(figure,),
    )


def placement(row: Row) -> str:
    return f"K={row['interval']}, first={row['first']}"


def case(row: Row) -> Case:
    at_once = cell(row, "before:.2f")
    tip = f"{row['label']}\n{placement(row)}\n{at_once and at_once + ' at once, '}{row['healed']:.2f} healed"
    dots = [Dot(value=row["healed"], role="repl", tip=tip)]
    if "before" in row:
        dots.append(Dot(value=row["before"], role="removal", hollow=True, tip=tip))
    return Case(label=row["label"], dots=tuple(dots))
