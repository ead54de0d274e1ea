"""INT8 after deploy (`benchmarks/int8.py`, `replearn bench inference --int8`): accuracy and speed on one CPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...bench.inference_paper import INT8
from ...training.paper import paper_tables
from ..dots import Case, Dot, dot_figure
from ..measured import Beside, Found, columns


def claims(data: Mapping[str, Any]) -> bool:
    rows = data.get("rows")
    return isinstance(rows, list) and bool(rows) and all("int8_speedup" in row for row in rows)


def show(data: Mapping[str, Any], key: str) -> Found:
    rows = data["rows"]
    table = columns(
        {
            "model": [row["model"] for row in rows],
            "method": [row["method"] for row in rows],
            "INT8": [row["int8"] for row in rows],
            "float32 top-1": [accuracy(row, "float32") for row in rows],
            "INT8 top-1": [accuracy(row, "int8") for row in rows],
            "float32, img/s": [speed(row, "float32") for row in rows],
            "INT8, img/s": [speed(row, "int8") for row in rows],
            "speedup": [f"{row['int8_speedup']['median']:.3f}" for row in rows],
            "paper, INT8 img/s": [
                f"{row['paper']['int8_images_per_second']:,.0f}" if row.get("paper") else "" for row in rows
            ],
        },
        left=("model", "method", "INT8"),
    )
    cases = []
    for row in rows:
        gain = row["int8_speedup"]
        tip = f"{row['model']}, {row['method']}\nINT8 {gain['median']:.3f} times as fast as float32"
        dot = Dot(value=gain["median"], low=gain["low"], high=gain["high"], role=role(row), tip=tip)
        cases.append(Case(label=f"{row['model']}, {row['method']}", dots=(dot,)))
    figure = dot_figure(
        cases,
        name=f"{key}-speed",
        title="INT8 against float32",
        about="how many times as fast INT8 is on the same CPU; right of the rule is faster.",
        x_title="speedup of INT8",
        legend=[("e2e", "E2E", False), ("repl", "RepL", False)],
        rule=(1.0, "float32"),
    )
    gains = [row["int8_speedup"]["median"] for row in rows]
    return Found(
        title="INT8 after deploy",
        sentence=f"INT8 is {min(gains):.2f} to {max(gains):.2f} times as fast as float32 on the same CPU",
        about="Both sides are deployed and run on the same CPU, in turns; the paper compares a GPU with a CPU.",
        tables=(table,),
        figures=(figure,),
        beside=tuple(beside(rows)),
    )


def role(row: Mapping[str, Any]) -> str:
    return "e2e" if row["method"] == "E2E" else "repl"


def accuracy(row: Mapping[str, Any], side: str) -> str:
    return f"{row['accuracy'][side]['top1']:.2f}" if row.get("accuracy") else ""


def speed(row: Mapping[str, Any], side: str) -> str:
    return f"{row['images_per_second'][side]:,.1f}"


def beside(rows: list[Mapping[str, Any]]) -> Iterator[Beside]:
    for row in rows:
        paper = row.get("paper") or {}
        for index, entry in enumerate(paper_tables()[INT8].rows):
            if paper and entry["int8_speed"] == paper["int8_images_per_second"]:
                reached = f"{speed(row, 'float32')} to {speed(row, 'int8')} img/s"
                yield Beside(table=INT8, row=index, reached=reached)
