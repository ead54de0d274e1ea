"""What the plan promised and the device measured (`benchmarks/memory_promise.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dots import Case, Dot, dot_figure
from ..measured import Found, columns


def claims(data: Mapping[str, Any]) -> bool:
    rows = data.get("rows")
    return isinstance(rows, list) and bool(rows) and all("predicted_over_measured" in row for row in rows)


def show(data: Mapping[str, Any], key: str) -> Found:
    rows = [row for row in data["rows"] if row["predicted_over_measured"]]
    if not rows:
        raise ValueError("nothing was measured: there was no GPU")
    table = columns(
        {
            "model": [row["model"] for row in rows],
            "precision": [row["precision"] for row in rows],
            "method": [row["method"] for row in rows],
            "promised peak, GB": [f"{row['predicted']['peak_bytes'] / 1e9:.3f}" for row in rows],
            "measured peak, GB": [f"{row['measured']['peak_bytes'] / 1e9:.3f}" for row in rows],
            "peak ratio": [ratio(row, "peak_bytes") for row in rows],
            "activations ratio": [ratio(row, "activation_bytes") for row in rows],
            "time ratio": [ratio(row, "seconds") for row in rows],
        },
        left=("model", "precision", "method"),
    )
    cases: list[Case] = []
    for name in dict.fromkeys((row["model"], row["precision"]) for row in rows):
        cases.append(Case(label=", ".join(name)))
        for row in (row for row in rows if (row["model"], row["precision"]) == name):
            tip = f"{row['model']}, {row['precision']}, {row['method']}\npromised / measured peak "
            role = row["method"] if row["method"] in ("e2e", "removal", "repl") else "series0"
            peak = row["predicted_over_measured"]["peak_bytes"]
            cases.append(Case(label=row["method"], dots=(Dot(value=peak, role=role, tip=tip + f"{peak:.3f}"),)))
    figure = dot_figure(
        cases,
        name=f"{key}-memory",
        title="Promised over measured memory",
        about="peak memory as the plan promised it over what the device measured; at the rule both agree.",
        x_title="promised / measured peak memory",
        legend=[("e2e", "E2E", False), ("removal", "removal", False), ("repl", "RepL", False)],
        rule=(1.0, "kept"),
    )
    worst = max((row["predicted_over_measured"]["peak_bytes"] for row in rows), key=lambda share: abs(share - 1))
    return Found(
        title="Promised and measured memory",
        sentence=f"peak memory was promised within {100 * abs(worst - 1):.1f} % in {len(rows)} cases",
        about="replearn.costs.predict makes the promise before anything runs. The time is that of arithmetic and "
        "memory traffic alone, a floor.",
        command="python benchmarks/memory_promise.py --out FILE",
        tables=(table,),
        figures=(figure,),
    )


def ratio(row: Mapping[str, Any], what: str) -> str:
    return f"{row['predicted_over_measured'][what]:.3f}"
