"""Whole epochs (`replearn bench epochs`): seconds, throughput and memory, with the paper's ratios beside them."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from ...bench.record import FORMAT
from ...training.compare import paper_ratio
from ...training.recipe import PaperRow, paper_row_from_dict
from ..chart import Case, Dot
from ..svg import series_roles
from . import Column, Cost, Found, Row, ratio_figure, table_of

COLUMNS: dict[str, Column] = {
    "run": "name",
    "s an epoch": "seconds:.3f",
    "time ratio": "time.median:.3f",
    "paper time": "paper_time:.3f",
    "samples/s in all": "images_per_second_in_all:,.0f",
    "GB": "gigabytes:.2f",
    "memory ratio": "memory_ratio:.3f",
    "paper memory": "paper_memory:.3f",
    "notes": lambda row: "; ".join(row["notes"]),
}


def claims(data: Mapping[str, Any]) -> bool:
    return data.get("format") == FORMAT and bool(data.get("epochs")) and not data.get("training")


def show(data: Mapping[str, Any], key: str) -> Found:
    tables, cases, sentences = [], [], []
    costs: dict[tuple[str, str, str], Cost] = {}
    for entry in data["epochs"]:
        recipe = entry["recipe"]
        printed = [paper_row_from_dict(row) for row in recipe.get("paper", ()) if row["data"] == entry["data"]]
        papers = {row.label: row for row in printed}
        rows = [derived(row, entry["rows"], papers) for row in entry["rows"]]
        tables.append(table_of(rows, COLUMNS, entry["title"]))
        roles = series_roles([row["label"].lower().partition(" ")[0] for row in rows])
        cases += [Case(label=entry["title"]), *map(case, rows, roles)]
        alone = [row for row in rows if row["runs"] == 1]
        for row in alone:
            costs[recipe["name"], entry["data"], row["label"]] = (row["time"]["median"], row["memory_ratio"])
        repl = [row for row in alone if row["label"].startswith("RepL")]
        sentences += [f"{row['label']} {row['time']['median']:.2f} of E2E's time" for row in repl]
    legend = [("repl", "ours", "dot"), ("repl", "paper", "ring")]
    return Found(
        title="Time of whole epochs: " + "; ".join(str(e["title"]).partition(":")[0] for e in data["epochs"]),
        sentence="; ".join(sentences),
        about="Times are ratios to E2E in the same run. The paper's are on its own hardware.",
        tables=tuple(tables),
        figures=(ratio_figure(cases, key, "time of an epoch, ratio to E2E", legend),),
        costs=costs,
    )


def derived(row: Row, rows: list[Row], papers: Mapping[str, PaperRow]) -> dict[str, Any]:
    """A row with what is computed from it: seconds, ratios to E2E, and the paper's ratios."""
    base = next((other["memory"] for other in rows if other["label"] == "E2E"), None)
    mine, full = papers.get(row["label"]), papers.get("E2E")
    return {
        **row,
        "name": row["label"] if row["runs"] == 1 else f"{row['label']}, {row['runs']} at once",
        "seconds": median(row["timing"]["milliseconds"]) / 1000,
        "gigabytes": row["memory"] / 1e9 if row["memory"] else None,
        "memory_ratio": row["memory"] / base if base and row["memory"] else None,
        "paper_time": paper_ratio(mine, full, "seconds_per_epoch"),
        "paper_memory": paper_ratio(mine, full, "memory_gb"),
    }


def case(row: Row, role: str) -> Case:
    dots = [Dot.of(row["time"], role, row["name"])]
    if row["paper_time"]:
        dots.append(Dot.printed(row["paper_time"], role, f"{row['label']} in the paper"))
    return Case(label=row["name"], dots=tuple(dots))
