"""The paper's tables, from one data file (`paper_tables.json`), and their rows for our recipes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from ...errors import ReplearnError
from .recipe import PaperRow

SCORES = ("accuracy", "perplexity", "map", "iou")  # columns with a recipe's metric


@cache
def paper_tables() -> Mapping[str, Any]:
    """Every table of the paper by its label: caption, columns, which way they are better, and rows as printed.

    >>> paper_tables()["t1"]["rows"][0]["accuracy"]
    [93.17, 0.14]
    """
    text = files("replearn.experiments").joinpath("paper_tables.json").read_text(encoding="utf-8")
    return dict(json.loads(text)["tables"])


def printed(
    table: str, backbone: str, labels: Mapping[str, str | tuple[str, ...]], data: str | None = None
) -> tuple[PaperRow, ...]:
    """Rows of a table for one backbone; `labels` maps the paper's name of a method to one or several of ours.

    ReplearnError where the table has no such row.

    >>> [row.label for row in printed("t3", "ResNet-110", {"- 25% layers": "removal"})]
    ['removal']
    """
    rows = [
        row
        for row in paper_tables()[table]["rows"]
        if row["backbone"] == backbone and row["method"] in labels and data in (None, row["data"])
    ]
    if missing := sorted(labels.keys() - {row["method"] for row in rows}):
        raise ReplearnError(f"The paper's table {table} has no row {missing[0]!r} for {backbone}.")
    found: list[PaperRow] = []
    for row in rows:
        ours = labels[row["method"]]
        score, std = pair(next(row[key] for key in SCORES if key in row))
        top5, top5_std = pair(row.get("top5"))
        own = PaperRow(
            data=row["data"],
            label="",
            score=score,
            std=std,
            top5=top5,
            top5_std=top5_std,
            memory_gb=row.get("memory"),
            seconds_per_epoch=row.get("time"),
            table=table,
        )
        found += [replace(own, label=label) for label in ((ours,) if isinstance(ours, str) else ours)]
    return tuple(found)


def pair(value: Any) -> tuple[Any, float | None]:
    """A printed value as mean and standard deviation, None where not printed."""
    return (value[0], value[1]) if isinstance(value, list) else (value, None)
