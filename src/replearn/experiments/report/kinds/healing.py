"""Healing after replacement (`benchmarks/heal_after_replacement.py`): at once, and after a short training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dots import Case, Dot, dot_figure
from ..measured import Found, columns
from ..scene import Drawing


def claims(data: Mapping[str, Any]) -> bool:
    return str(data.get("script", "")).endswith("heal_after_replacement.py")


def show(data: Mapping[str, Any], key: str) -> Found:
    metric, trained, rows = str(data["metric"]), float(data["trained"]), data["rows"]
    lower = metric == "perplexity"
    before = [row["before"] for row in rows if "before" in row]
    healed = [row["healed"] for row in rows if "before" in row]
    table = columns(
        {
            "placement": [placement(row) for row in rows],
            "blocks out": [f"{row['targets']} of {row['blocks']}" if "blocks" in row else "" for row in rows],
            "in their place": [row["label"] for row in rows],
            f"{metric} at once": [f"{row['before']:.2f}" if "before" in row else "" for row in rows],
            "healed": [f"{row['healed']:.2f}" for row in rows],
            "fit, s": [f"{row['fit_seconds']:.1f}" if "fit_seconds" in row else "" for row in rows],
            "heal, s": [f"{row['heal_seconds']:.1f}" if "heal_seconds" in row else "" for row in rows],
            "parameters": [f"{row['parameters']:,}" if "parameters" in row else "" for row in rows],
        },
        left=("placement", "in their place"),
    )
    model = data.get("recipe", {}).get("model") or data["arguments"]["model"]
    about = (
        f"{metric}, {'lower' if lower else 'higher'} is better, on the test set: right after the replacement, and "
    )
    about += "after a short training of the whole network."
    if data.get("note"):
        about += f" Note: {data['note']}."
    return Found(
        title=f"Healing after replacement: {model}",
        sentence=f"{metric} {trained:.2f} trained; {len(healed)} rows: {min(before):.2f} to {max(before):.2f} at "
        f"once, {min(healed):.2f} to {max(healed):.2f} healed",
        about=about,
        tables=(table,),
        figures=(figure(rows, metric, trained, key),),
    )


def placement(row: Mapping[str, Any]) -> str:
    return f"K={row['interval']}, first={row['first']}"


def figure(rows: list[Mapping[str, Any]], metric: str, trained: float, key: str) -> Drawing:
    cases: list[Case] = []
    for name in dict.fromkeys(placement(row) for row in rows):
        cases.append(Case(label=name))
        for row in (row for row in rows if placement(row) == name):
            tip = f"{row['label']}\n{name}\n" + (f"{row['before']:.2f} at once, " if "before" in row else "")
            tip += f"{row['healed']:.2f} healed"
            dots = [Dot(value=row["healed"], role="repl", tip=tip)]
            if "before" in row:
                dots.append(Dot(value=row["before"], role="removal", hollow=True, tip=tip))
            cases.append(Case(label=row["label"], dots=tuple(dots)))
    return dot_figure(
        cases,
        name=f"{key}-{metric}",
        title="At once and healed",
        about=f"test {metric} right after replacing blocks (rings) and after healing (dots).",
        x_title=f"test {metric}",
        legend=[("removal", "at once", True), ("repl", "healed", False)],
        rule=(trained, "trained"),
    )
