"""Inference latency (`replearn bench inference`): deployed against E2E and against the dynamic model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...bench.inference import FORMAT
from ...bench.inference_paper import BASELINE, DYNAMIC
from ...training.paper import paper_tables
from ..chart import Case, Dot, dot_figure
from . import Beside, Found, Row, cell, span, table_of

E2E, PLAIN, MIXED = "E2E", "RepL deployed", "RepL dynamic"
GAIN = f"{PLAIN} against {E2E}"
# by the paper's table: the column of its slower side, our time of that side, and our speedup
SIDES = {
    BASELINE: ("bp", f"milliseconds.{E2E}.median:.3f", f"speedup.{GAIN}.median:.3f"),
    DYNAMIC: ("dynamic", f"milliseconds.{MIXED}.median:.3f", f"speedup.{PLAIN} against {MIXED}.median:.3f"),
}
DEPLOYED = f"milliseconds.{PLAIN}.median:.3f"


def claims(data: Mapping[str, Any]) -> bool:
    return data.get("format") == FORMAT


def show(data: Mapping[str, Any], key: str) -> Found:
    rows, setting = data["rows"], data["setting"]
    table = table_of(
        rows,
        {
            "model": "model",
            "blocks out": "targets",
            "backend": "backend",
            "batch": "batch",
            "E2E, ms": SIDES[BASELINE][1],
            "dynamic, ms": SIDES[DYNAMIC][1],
            "deployed, ms": DEPLOYED,
            "deployed against E2E": SIDES[BASELINE][2],
            "paper, against E2E": f"paper.{BASELINE}.speedup:.3f",
            "deployed against dynamic": SIDES[DYNAMIC][2],
            "paper, against dynamic": f"paper.{DYNAMIC}.speedup:.3f",
        },
    )
    gains = [row["speedup"][GAIN]["median"] for row in rows]
    figures = [
        dot_figure(
            [case(row) for row in rows if row["model"] == model],
            name=f"{key}-{number}",
            title=f"Deployed {model} against E2E",
            about="how many times as fast the deployed model is; right of the rule is faster. Rings: the paper.",
            x_title="speedup of the deployed model",
            legend_of=[("repl", "deployed RepL", "dot"), ("paper", "paper", "ring")],
            rule=(1.0, "E2E"),
        )
        for number, model in enumerate(dict.fromkeys(row["model"] for row in rows), start=1)
    ]
    lists = {"batch-size": setting["batches"], "backend": setting["backends"]}
    words = [*setting["models"], *(f"--{flag} {','.join(map(str, given))}" for flag, given in lists.items())]
    words += [f"--{name} {setting[name]}" for name in ("size", "first", "rounds")]
    faster = sum(gain > 1 for gain in gains)
    unfinished = " The run was stopped before its end: these are its first rows."
    stopped = "" if data.get("finished", True) else unfinished
    return Found(
        title="Inference latency",
        sentence=f"deployed is {span(gains)} times as fast as E2E, faster in {faster} of {len(gains)} cases",
        about="Milliseconds a batch, medians; speedups are taken round by round, more than 1 is faster. Deployed: "
        f"BatchNorms folded and operators made into plain layers.{stopped}",
        tables=(table,),
        figures=tuple(figures),
        beside=tuple(beside(rows)),
        command=" ".join(["replearn bench inference", *words, "--out FILE"]),
    )


def case(row: Row) -> Case:
    found, name = row["speedup"][GAIN], f"{row['backend']}, batch {row['batch']}"
    tip = f"{row['model']}, {name}\n{found['median']:.3f} times as fast as E2E\n"
    tip += f"{cell(row, SIDES[BASELINE][1])} ms before, {cell(row, DEPLOYED)} ms deployed"
    dots = [Dot.of(found, "repl", tip)]
    if paper := row["paper"].get(BASELINE):
        tip = f"{row['model']}, {name}, in the paper\n{paper['speedup']:.3f} times as fast"
        dots.append(Dot(value=paper["speedup"], role="paper", hollow=True, tip=tip))
    return Case(label=name, dots=tuple(dots))


def beside(rows: list[Row]) -> Iterator[Beside]:
    for row in rows:
        for table, paper in row["paper"].items():
            column, before, gain = SIDES[table]
            for index, entry in enumerate(paper_tables()[table].rows):
                if (entry[column], entry["deploy"]) == (paper["base"], paper["deployed"]):
                    reached = f"{cell(row, before)} to {cell(row, DEPLOYED)} ms, {cell(row, gain)}x"
                    yield Beside(table=table, row=index, reached=reached)
