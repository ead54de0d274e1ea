"""Inference latency (`replearn bench inference`): deployed against E2E and against the dynamic model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...bench.inference import FORMAT, PAPER_DYNAMIC, PAPER_E2E
from ..chart import Case, Dot, grouped
from . import Column, Found, Row, ratio_figure, span, table_of

GAIN = "RepL deployed against E2E"
COLUMNS: dict[str, Column] = {
    "model": "model",
    "blocks out": "targets",
    "backend": "backend",
    "batch": "batch",
    "E2E, ms": "milliseconds.E2E.median:.3f",
    "dynamic, ms": "milliseconds.RepL dynamic.median:.3f",
    "deployed, ms": "milliseconds.RepL deployed.median:.3f",
    "deployed against E2E": f"speedup.{GAIN}.median:.3f",
    "paper, against E2E": f"paper.{PAPER_E2E}.speedup:.3f",
    "deployed against dynamic": "speedup.RepL deployed against RepL dynamic.median:.3f",
    "paper, against dynamic": f"paper.{PAPER_DYNAMIC}.speedup:.3f",
}


def claims(data: Mapping[str, Any]) -> bool:
    return data.get("format") == FORMAT


def show(data: Mapping[str, Any], key: str) -> Found:
    rows, setting = data["rows"], data["setting"]
    gains = [row["speedup"][GAIN]["median"] for row in rows]
    lists = {"batch-size": setting["batches"], "backend": setting["backends"]}
    words = [*setting["models"], *(f"--{flag} {','.join(map(str, given))}" for flag, given in lists.items())]
    words += [f"--{name} {setting[name]}" for name in ("size", "first", "rounds")]
    stopped = "" if data.get("finished", True) else " It was stopped before its end: these are its first rows."
    cases = grouped(rows, lambda row: str(row["model"]), case)
    legend = [("repl", "deployed RepL", "dot"), ("paper", "paper", "ring")]
    faster = sum(gain > 1 for gain in gains)
    return Found(
        title="Inference latency",
        sentence=f"deployed is {span(gains)} times as fast as E2E, faster in {faster} of {len(gains)} cases",
        about="Milliseconds a batch, medians; speedups are taken round by round, more than 1 is faster. Deployed: "
        f"BatchNorms folded and operators made into plain layers.{stopped}",
        tables=(table_of(rows, COLUMNS),),
        figures=(ratio_figure(cases, key, "speedup of the deployed model", legend),),
        command=" ".join(["replearn bench inference", *words, "--out FILE"]),
    )


def case(row: Row) -> Case:
    name = f"{row['backend']}, batch {row['batch']}"
    dots = [Dot.of(row["speedup"][GAIN], "repl", f"{row['model']}, {name}")]
    if paper := row["paper"].get(PAPER_E2E):
        dots.append(Dot.printed(paper["speedup"], "paper", f"{row['model']}, {name}, in the paper"))
    return Case(label=name, dots=tuple(dots))
