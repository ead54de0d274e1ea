"""Whole epochs (`replearn bench epochs`): seconds, throughput and memory, with the paper's ratios beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...bench.record import FORMAT
from ...training.compare import paper_ratio
from ...training.paper import SCORES, paper_row, paper_tables
from ...training.recipe import PaperRow, paper_row_from_dict
from ..dots import Case, Dot, dot_figure
from ..measured import Beside, Found, columns, median
from ..scene import series_roles


def claims(data: Mapping[str, Any]) -> bool:
    return data.get("format") == FORMAT and bool(data.get("epochs")) and not data.get("training")


def show(data: Mapping[str, Any], key: str) -> Found:
    tables, cases = [], []
    beside: list[Beside] = []
    sentences = []
    for entry in data["epochs"]:
        rows, papers = entry["rows"], papers_of(entry)
        full = papers.get("E2E")
        paper_time = [paper_ratio(papers.get(row["label"]), full, "seconds_per_epoch") for row in rows]
        paper_memory = [paper_ratio(papers.get(row["label"]), full, "memory_gb") for row in rows]
        base = next((row["memory"] for row in rows if row["label"] == "E2E"), None)
        memory = [row["memory"] / base if base and row["memory"] else None for row in rows]
        tables.append(
            columns(
                {
                    "run": [named(row) for row in rows],
                    "s an epoch": [f"{median(row['timing']['milliseconds']) / 1000:.3f}" for row in rows],
                    "time ratio": [f"{row['time']['median']:.3f}" for row in rows],
                    "paper time": [text(value) for value in paper_time],
                    "samples/s in all": [f"{row['images_per_second_in_all']:,.0f}" for row in rows],
                    "GB": [f"{row['memory'] / 1e9:.2f}" if row["memory"] else "" for row in rows],
                    "memory ratio": [text(value) for value in memory],
                    "paper memory": [text(value) for value in paper_memory],
                    "notes": ["; ".join(row["notes"]) for row in rows],
                },
                left=("run", "notes"),
                title=entry["title"],
            )
        )
        cases.append(Case(label=entry["title"]))
        roles = series_roles([row["label"].lower().partition(" ")[0] for row in rows])
        for row, role, printed, share in zip(rows, roles, paper_time, memory, strict=True):
            time = row["time"]
            tip = f"{named(row)}\ntime {time['median']:.3f} of E2E"
            dot = Dot(value=time["median"], low=time["low"], high=time["high"], role=role, tip=tip)
            tip = f"{row['label']} in the paper\ntime {text(printed)} of E2E"
            ring = Dot(value=printed or 1.0, role=role, hollow=True, tip=tip)
            cases.append(Case(label=named(row), dots=(dot, ring) if printed else (dot,)))
            if row["label"] in papers and row["runs"] == 1:
                beside += beside_of(papers[row["label"]], time["median"], share)
        sentences += [
            f"{row['label']} {row['time']['median']:.2f} of E2E's time"
            for row in rows
            if row["label"].startswith("RepL") and row["runs"] == 1
        ]
    title = "Time of whole epochs: " + "; ".join(str(entry["title"]).partition(":")[0] for entry in data["epochs"])
    about = "Times are ratios to E2E in the same run. The paper's are on its own hardware."
    figure = dot_figure(
        cases,
        name=f"{key}-time",
        title="Time of an epoch",
        about="time of an epoch as a ratio to E2E; dashed rings are the paper's.",
        x_title="time of an epoch, ratio to E2E",
        legend=[("repl", "ours", False), ("repl", "paper", True)],
        rule=(1.0, "E2E"),
    )
    return Found(
        title=title,
        sentence="; ".join(sentences),
        about=about,
        tables=tuple(tables),
        figures=(figure,),
        beside=tuple(beside),
    )


def named(row: Mapping[str, Any]) -> str:
    return str(row["label"]) if row["runs"] == 1 else f"{row['label']}, {row['runs']} at once"


def text(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def papers_of(entry: Mapping[str, Any]) -> dict[str, PaperRow]:
    recipe = entry["recipe"]
    rows = [paper_row_from_dict(row) for row in recipe.get("paper", ()) if row["data"] == entry["data"]]
    return {row.label: replace(row, table=row.table or recipe["table"]) for row in rows}


def beside_of(row: PaperRow, time: float, memory: float | None) -> Iterator[Beside]:
    """The row of the paper's table that this one stands for."""
    for index, entry in enumerate(paper_tables()[row.table].rows if row.table else ()):
        if any(score in entry for score in SCORES) and paper_row(entry, row.label, row.table) == row:
            yield Beside(table=row.table, row=index, time=time, memory=memory)
