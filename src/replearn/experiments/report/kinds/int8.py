"""INT8 after deploy (`benchmarks/int8.py`): accuracy and speed on one CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..chart import Case, Dot
from . import Column, Found, Row, ratio_figure, span, table_of

COLUMNS: dict[str, Column] = {
    "model": "model",
    "method": "method",
    "INT8": "int8",
    "float32 top-1": "accuracy.float32.top1:.2f",
    "INT8 top-1": "accuracy.int8.top1:.2f",
    "float32, img/s": "images_per_second.float32:,.1f",
    "INT8, img/s": "images_per_second.int8:,.1f",
    "speedup": "int8_speedup.median:.3f",
    "paper, INT8 img/s": "paper.int8_images_per_second:,.0f",
}


def claims(data: Mapping[str, Any]) -> bool:
    rows = data.get("rows")
    return isinstance(rows, list) and bool(rows) and all("int8_speedup" in row for row in rows)


def show(data: Mapping[str, Any], key: str) -> Found:
    rows = data["rows"]
    legend = [("e2e", "E2E", "dot"), ("repl", "RepL", "dot")]
    gains = span([row["int8_speedup"]["median"] for row in rows])
    return Found(
        title="INT8 after deploy",
        sentence=f"INT8 is {gains} times as fast as float32 on the same CPU",
        about="Both sides are deployed and run on the same CPU, in turns; the paper compares a GPU with a CPU.",
        tables=(table_of(rows, COLUMNS),),
        figures=(ratio_figure([case(row) for row in rows], key, "speedup of INT8", legend, "float32"),),
    )


def case(row: Row) -> Case:
    name = f"{row['model']}, {row['method']}"
    return Case(label=name, dots=(Dot.of(row["int8_speedup"], "e2e" if row["method"] == "E2E" else "repl", name),))
