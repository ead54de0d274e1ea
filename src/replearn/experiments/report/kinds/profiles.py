"""A step's kernels by time (`benchmarks/profile_step.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..dots import Case, Dot, dot_figure
from ..measured import Found, columns

MOST_KERNELS = 20


def claims(data: Mapping[str, Any]) -> bool:
    kernels = data.get("kernels")
    return isinstance(kernels, list) and bool(kernels) and all(isinstance(row, Mapping) for row in kernels)


def show(data: Mapping[str, Any], key: str) -> Found:
    whole, rows = float(data["ms"]), data["kernels"]
    table = columns(
        {
            "kernel": [str(row["kernel"]) for row in rows],
            "ms": [f"{row['ms']:.3f}" for row in rows],
            "share": [f"{100 * row['ms'] / whole:.1f} %" for row in rows],
            "launches": [f"{row['launches']:.0f}" for row in rows],
        },
        left=("kernel",),
    )
    cases = []
    for row in rows[:MOST_KERNELS]:
        tip = f"{row['kernel']}\n{row['ms']:.3f} ms in {row['launches']:.0f} launches"
        cases.append(Case(label=str(row["kernel"]), dots=(Dot(value=row["ms"], role="repl", tip=tip),)))
    figure = dot_figure(
        cases,
        name=f"{key}-kernels",
        title="The longest kernels",
        about=f"milliseconds of a step of {whole:.2f} ms, by kernel.",
        x_title="ms a step",
        legend=[("repl", "a kernel", False)],
    )
    words = [data.get("case"), data.get("side"), data.get("backend")]
    return Found(
        title=f"Kernels of a step: {', '.join(str(word) for word in words if word)}",
        sentence=f"{whole:.2f} ms in {data['launches']:.0f} launches",
        about=f"{data['note']}." if data.get("note") else "",
        tables=(table,),
        figures=(figure,),
        command=command_of(data),
    )


def command_of(data: Mapping[str, Any]) -> str:
    model = str(data["case"]).partition(",")[0]
    options = f"--model {model} --side {data['side']} --backend {data['backend']}"
    return f"python benchmarks/profile_step.py {options} --out FILE"
