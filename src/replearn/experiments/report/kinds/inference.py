"""Inference latency (`replearn bench inference`): deployed against E2E and against the dynamic model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...bench.inference import FORMAT
from ...bench.inference_paper import BASELINE, DYNAMIC
from ...training.paper import paper_tables
from ..dots import Case, Dot, dot_figure
from ..measured import Beside, Found, columns
from ..scene import Drawing

E2E, PLAIN, MIXED = "E2E", "RepL deployed", "RepL dynamic"
SPEEDUPS = {BASELINE: f"{PLAIN} against {E2E}", DYNAMIC: f"{PLAIN} against {MIXED}"}
BASES = {BASELINE: (E2E, "bp"), DYNAMIC: (MIXED, "dynamic")}


def claims(data: Mapping[str, Any]) -> bool:
    return data.get("format") == FORMAT


def show(data: Mapping[str, Any], key: str) -> Found:
    rows = data["rows"]
    table = columns(
        {
            "model": [row["model"] for row in rows],
            "blocks out": [row["targets"] for row in rows],
            "backend": [row["backend"] for row in rows],
            "batch": [str(row["batch"]) for row in rows],
            "E2E, ms": [milliseconds(row, E2E) for row in rows],
            "dynamic, ms": [milliseconds(row, MIXED) for row in rows],
            "deployed, ms": [milliseconds(row, PLAIN) for row in rows],
            "deployed against E2E": [speedup(row, BASELINE) for row in rows],
            "paper, against E2E": [printed(row, BASELINE) for row in rows],
            "deployed against dynamic": [speedup(row, DYNAMIC) for row in rows],
            "paper, against dynamic": [printed(row, DYNAMIC) for row in rows],
        },
        left=("model", "backend"),
    )
    gains = [row["speedup"][SPEEDUPS[BASELINE]]["median"] for row in rows]
    faster = sum(gain > 1 for gain in gains)
    return Found(
        title="Inference latency",
        sentence=f"deployed is {min(gains):.2f} to {max(gains):.2f} times as fast as E2E, faster in {faster} of "
        f"{len(gains)} cases",
        about="Milliseconds a batch, medians; speedups are taken round by round, more than 1 is faster. Deployed: "
        "BatchNorms folded and operators made into plain layers."
        + ("" if data.get("finished", True) else " The run was stopped before its end: these are its first rows."),
        tables=(table,),
        figures=tuple(figures(rows, key)),
        beside=tuple(beside(rows)),
        command=command_of(data["setting"]),
    )


def command_of(setting: Mapping[str, Any]) -> str:
    words = ["replearn bench inference"]
    words += [f"--{name} {','.join(map(str, setting[name]))}" for name in ("models", "batches", "backends")]
    words += [f"--{name} {setting[name]}" for name in ("size", "first", "rounds")]
    return " ".join([*words, "--out FILE"])


def milliseconds(row: Mapping[str, Any], side: str) -> str:
    return f"{row['milliseconds'][side]['median']:.3f}" if side in row["milliseconds"] else ""


def speedup(row: Mapping[str, Any], table: str) -> str:
    found = row["speedup"].get(SPEEDUPS[table])
    return f"{found['median']:.3f}" if found else ""


def printed(row: Mapping[str, Any], table: str) -> str:
    found = row["paper"].get(table)
    return f"{found['speedup']:.3f}" if found else ""


def figures(rows: list[Mapping[str, Any]], key: str) -> Iterator[Drawing]:
    for number, model in enumerate(dict.fromkeys(row["model"] for row in rows), start=1):
        cases = []
        for row in (row for row in rows if row["model"] == model):
            found, case = row["speedup"][SPEEDUPS[BASELINE]], f"{row['backend']}, batch {row['batch']}"
            tip = f"{model}, {case}\n{found['median']:.3f} times as fast as E2E\n"
            tip += f"{milliseconds(row, E2E)} ms before, {milliseconds(row, PLAIN)} ms deployed"
            dots = [Dot(value=found["median"], low=found["low"], high=found["high"], role="repl", tip=tip)]
            if paper := row["paper"].get(BASELINE):
                tip = f"{model}, {case}, in the paper\n{paper['speedup']:.3f} times as fast"
                dots.append(Dot(value=paper["speedup"], role="paper", hollow=True, tip=tip))
            cases.append(Case(label=case, dots=tuple(dots)))
        yield dot_figure(
            cases,
            name=f"{key}-{number}",
            title=f"Deployed {model} against E2E",
            about="how many times as fast the deployed model is; right of the rule is faster. Rings: the paper.",
            x_title="speedup of the deployed model",
            legend=[("repl", "deployed RepL", False), ("paper", "paper", True)],
            rule=(1.0, "E2E"),
        )


def beside(rows: list[Mapping[str, Any]]) -> Iterator[Beside]:
    for row in rows:
        for table, paper in row["paper"].items():
            side, column = BASES[table]
            for index, entry in enumerate(paper_tables()[table].rows):
                if (entry[column], entry["deploy"]) == (paper["base"], paper["deployed"]):
                    reached = f"{milliseconds(row, side)} to {milliseconds(row, PLAIN)} ms, {speedup(row, table)}x"
                    yield Beside(table=table, row=index, reached=reached)
