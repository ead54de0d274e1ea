"""INT8 after deploy (`benchmarks/int8.py`, `replearn bench inference --int8`): accuracy and speed on one CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...bench.inference_paper import INT8
from ...training.paper import paper_tables
from ..chart import Case, Dot, dot_figure
from . import Beside, Found, Row, cell, span, table_of

BEFORE, AFTER = "images_per_second.float32:,.1f", "images_per_second.int8:,.1f"


def claims(data: Mapping[str, Any]) -> bool:
    rows = data.get("rows")
    return isinstance(rows, list) and bool(rows) and all("int8_speedup" in row for row in rows)


def show(data: Mapping[str, Any], key: str) -> Found:
    rows = data["rows"]
    table = table_of(
        rows,
        {
            "model": "model",
            "method": "method",
            "INT8": "int8",
            "float32 top-1": "accuracy.float32.top1:.2f",
            "INT8 top-1": "accuracy.int8.top1:.2f",
            "float32, img/s": BEFORE,
            "INT8, img/s": AFTER,
            "speedup": "int8_speedup.median:.3f",
            "paper, INT8 img/s": "paper.int8_images_per_second:,.0f",
        },
    )
    figure = dot_figure(
        [case(row) for row in rows],
        name=f"{key}-speed",
        title="INT8 against float32",
        about="how many times as fast INT8 is on the same CPU; right of the rule is faster.",
        x_title="speedup of INT8",
        legend_of=[("e2e", "E2E", "dot"), ("repl", "RepL", "dot")],
        rule=(1.0, "float32"),
    )
    gains = span([row["int8_speedup"]["median"] for row in rows])
    return Found(
        title="INT8 after deploy",
        sentence=f"INT8 is {gains} times as fast as float32 on the same CPU",
        about="Both sides are deployed and run on the same CPU, in turns; the paper compares a GPU with a CPU.",
        tables=(table,),
        figures=(figure,),
        beside=tuple(beside(rows)),
    )


def case(row: Row) -> Case:
    gain, name = row["int8_speedup"], f"{row['model']}, {row['method']}"
    tip = f"{name}\nINT8 {gain['median']:.3f} times as fast as float32"
    role = "e2e" if row["method"] == "E2E" else "repl"
    return Case(label=name, dots=(Dot.of(gain, role, tip),))


def beside(rows: list[Row]) -> Iterator[Beside]:
    for row in rows:
        paper = row.get("paper") or {}
        for index, entry in enumerate(paper_tables()[INT8].rows):
            if paper and entry["int8_speed"] == paper["int8_images_per_second"]:
                yield Beside(table=INT8, row=index, reached=f"{cell(row, BEFORE)} to {cell(row, AFTER)} img/s")
