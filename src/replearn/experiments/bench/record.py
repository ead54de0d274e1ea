"""What a benchmark found, as data: rows with ratios to E2E in the same run, and how they were measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...costs import Machine
from ...errors import ReplearnError
from ...planning.serialization import encode
from ..training.results import hardware_of, now, versions_of, write_atomically
from .promised import Promised
from .timing import Ratio, Timing

FORMAT = "replearn-bench-1"


@dataclass(frozen=True, kw_only=True)
class Row:
    label: str
    timing: Timing
    time: Ratio  # over E2E, round by round
    memory: int | None  # bytes; None where the device can't tell
    memory_ratio: float | None
    parameters: int
    flops: int  # of a forward pass on one image
    promised: Promised | None = None  # what the cost model predicted; None in older files, and for some sides


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All candidates of one case on one backend, measured in turns in one process."""

    case: Mapping[str, Any]
    title: str
    backend: str
    rows: tuple[Row, ...]
    eta: float  # the operators' FLOPs over the removed blocks'
    yield_: float | None  # of the saving that arithmetic allows, the share that was reached
    synthesis: Ratio | None  # RepL over RepL with its weights given
    frozen: Ratio | None  # RepL over RepL with its weights frozen as constants
    notes: tuple[str, ...] = ()
    machine: Machine | None = None  # that the predicted times are for

    def row(self, label: str) -> Row:
        found = next((row for row in self.rows if row.label == label), None)
        if found is None:
            raise ReplearnError(f"{self.title} on {self.backend} has no row {label!r}.")
        return found


@dataclass(frozen=True, kw_only=True)
class Record:
    command: str
    rounds: int
    inner: int
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    started: str
    training: tuple[Comparison, ...] = ()
    epochs: tuple[Mapping[str, Any], ...] = ()
    builds: int = 1  # of every candidate, each of which is timed for all the rounds

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **encode(self)}, indent=1)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.to_json() + "\n")


def new_record(command: str, device: Any, rounds: int, inner: int, **found: Any) -> Record:
    about: dict[str, Any] = {"hardware": hardware_of(device), "versions": versions_of(), "started": now()}
    return Record(command=command, rounds=rounds, inner=inner, **about, **found)
