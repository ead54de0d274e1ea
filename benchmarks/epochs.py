"""Whole epochs of a recipe's rows, in turns: data, augmentation, loss, optimizer and all.

    python benchmarks/epochs.py t1_resnet32 --methods e2e,repl --set precision=bfloat16 --together 4 --out FILE

The first epoch, which compiles and captures, is not timed, nor is evaluation.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from replearn.cli.runs import data_of, resolved, spec_of, variants_named
from replearn.errors import ReplearnError
from replearn.experiments.bench.record import gibibytes, new_record, record_json
from replearn.experiments.bench.timing import Spread, Timing, interleave, ratio
from replearn.experiments.training.fit import device_named, settings, streams_for
from replearn.experiments.training.processes import Processes
from replearn.experiments.training.run import Run, RunSpec
from replearn.experiments.training.tasks import Task, task_named
from replearn.fast.graphs.capture import take_workspaces
from replearn.planning.table import text_table


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One run's epoch, or one epoch of several runs that share the device."""

    label: str
    runs: int
    timing: Timing  # milliseconds
    time: Spread  # over the first row's
    images_per_second: float  # of each run
    images_per_second_in_all: float
    memory: int | None
    notes: tuple[str, ...]


def compare_epochs(
    specs: Sequence[RunSpec], device: torch.device, *, rounds: int = 5, together: int = 0
) -> tuple[EpochRow, ...]:
    """Time an epoch of every run in turns, without evaluation and not the first, which compiles and captures.

    `together` adds that many seeds of the first run at once.
    """
    if not specs:
        raise ReplearnError("There is nothing to time: give at least one run.")
    shared: dict[Any, Any] = {}
    alone = Processes()

    def opened(spec: RunSpec) -> Task:
        return task_named(spec.recipe.task)(spec, device, alone, shared)

    with settings(specs[0], deterministic=False):
        opened(specs[0])  # the data set, which no run is charged for
        wanted = {spec.variant.label: [spec] for spec in specs}
        if together > 1:
            seeds = [replace(specs[0], seed=specs[0].seed + number) for number in range(together)]
            wanted[f"{specs[0].variant.label}, {together} seeds together"] = seeds
        groups: dict[str, list[Run]] = {}
        streams: dict[str, list[Any]] = {}
        memory: dict[str, int | None] = {}
        on_gpu = device.type == "cuda"
        if on_gpu:
            take_workspaces(device)
        for label, group in wanted.items():
            before = torch.cuda.memory_allocated(device) if on_gpu else 0
            groups[label] = [Run(spec, opened(spec), device, alone) for spec in group]
            streams[label] = streams_for(len(group), device)
            _epoch(groups[label], streams[label])  # compiles and captures
            memory[label] = groups[label][0].peak_memory - before if on_gpu and len(group) == 1 else None
        bodies = {label: partial(_epoch, groups[label], streams[label]) for label in groups}
        timings = interleave(bodies, device, rounds=rounds, warmup=0)
    images = {label: runs[0].steps_per_epoch * runs[0].spec.recipe.batch_size for label, runs in groups.items()}
    return tuple(
        EpochRow(
            label=label,
            runs=len(groups[label]),
            timing=timing,
            time=ratio(timing, timings[specs[0].variant.label]),
            images_per_second=1000 * images[label] / timing.median,
            images_per_second_in_all=len(groups[label]) * 1000 * images[label] / timing.median,
            memory=memory[label],
            notes=tuple(groups[label][0].notes),
        )
        for label, timing in timings.items()
    )


def epochs_table(title: str, rows: Sequence[EpochRow]) -> str:
    """Whole epochs as text."""
    head = ("run", "s an epoch", "time", "samples/s each", "in all", "memory")
    cells = []
    for row in rows:
        speeds = (f"{row.images_per_second:,.0f}", f"{row.images_per_second_in_all:,.0f}")
        time = (f"{row.timing.median / 1000:.3f}", str(row.time))
        cells.append((row.label, *time, *speeds, gibibytes(row.memory)))
    notes = sorted({f"note: {row.label}: {note}" for row in rows for note in row.notes})
    return "\n".join([title, "", *text_table(head, cells, right=(1, 3, 4, 5)), "", *notes])


def _epoch(runs: Sequence[Run], streams: Sequence[Any]) -> None:
    for run in runs:
        run.start_epoch()
    if streams[0] is not None:
        torch.cuda.synchronize()
    for _ in range(runs[0].steps_per_epoch):
        for run, stream in zip(runs, streams, strict=True):
            with torch.cuda.stream(stream):
                run.step()
    if streams[0] is not None:
        torch.cuda.synchronize()
    for run in runs:
        run.epoch, run.step_in_epoch = run.epoch + 1, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--methods", help="some of its rows, as e2e,repl")
    parser.add_argument("--data")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--together", type=int, default=0, help="seeds of the first row at once, too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, recipe = device_named(options.device), resolved(options.recipe, None, options.set)
    on, labels = data_of(recipe, options.data), options.methods and options.methods.split(",")
    specs = [spec_of(recipe, row, on, 0, None, options.data_root) for row in variants_named(recipe, labels)]
    rows = compare_epochs(specs, device, rounds=options.rounds, together=options.together)
    title = f"{recipe.name}: {recipe.model} on {on}, batch {recipe.batch_size}"
    entry = {"title": title, "recipe": recipe, "data": on, "rows": rows}
    command = " ".join(["python benchmarks/epochs.py", *sys.argv[1:]])
    record_json(new_record(command, device, rounds=options.rounds, inner=1, epochs=[entry]), options.out)
    print(epochs_table(title, rows))


if __name__ == "__main__":
    main()
