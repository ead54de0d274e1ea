"""What a benchmark found: rows with ratios to E2E in the same run, how they were measured, and as text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...planning.serialization import encode
from ...planning.table import text_table
from ..training.comparison_table import ratio
from ..training.results import hardware_of, now, versions_of, write_atomically
from .timing import Spread, Timing

FORMAT = "replearn-bench-1"
LEGEND = """\
time and memory are ratios to E2E in the same run, medians over rounds (of all builds) with quartiles in brackets
eta: the operators' FLOPs over the removed blocks'
yield: what RepL saved of what arithmetic allows, (1 - removal) (1 - eta)"""


@dataclass(frozen=True, kw_only=True)
class Row:
    label: str
    timing: Timing
    time: Spread  # over E2E, round by round
    memory: int | None  # bytes; None where the device can't tell
    memory_ratio: float | None
    parameters: int
    flops: int  # of a forward pass on one image


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All candidates of one case on one backend, measured in turns in one process."""

    case: Mapping[str, Any]
    title: str
    backend: str
    rows: tuple[Row, ...]
    eta: float  # the operators' FLOPs over the removed blocks'
    yield_: float | None  # of the saving that arithmetic allows, the share that was reached
    notes: tuple[str, ...] = ()


def new_record(command: str, device: torch.device, **found: Any) -> dict[str, Any]:
    about = {"format": FORMAT, "command": command, "started": now()}
    return about | {"hardware": hardware_of(device), "versions": versions_of(), **found}


def record_json(record: Mapping[str, Any], out: Path | None) -> str:
    """The record as JSON, which is also written to a file if there is to be one."""
    text = json.dumps(encode(record), indent=1)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, text + "\n")
    return text


def training_table(comparison: Comparison) -> str:
    """One case on one backend as text."""
    head = ("candidate", "ms a step", "time", "memory", "of E2E", "parameters")
    rows = []
    for row in comparison.rows:
        memory = (gibibytes(row.memory), ratio(row.memory_ratio))
        rows.append((row.label, f"{row.timing.median:.2f}", str(row.time), *memory, f"{row.parameters:,}"))
    lines = [f"{comparison.title}; {comparison.backend}", "", *text_table(head, rows, right=(1, 3, 4, 5))]
    facts = [f"eta {comparison.eta:.3f}"]
    if comparison.yield_ is not None:
        facts.append(f"yield {comparison.yield_:.2f}")
    return "\n".join([*lines, "", ", ".join(facts), *(f"note: {note}" for note in comparison.notes)])


def gibibytes(memory: int | None) -> str:
    return "" if memory is None else f"{memory / 2**30:.2f} GiB"
