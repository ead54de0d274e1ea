"""Many runs in one file of JSON lines: small enough to commit, with all that tables and reports need.

A line without a seed has the fields that the runs after it share, a line with one the rest of that run. Of long
curves 20 epochs are stored: evenly spaced ones, the best, the one of the highest memory and the last.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from json import dumps
from pathlib import Path
from typing import Any

from ...errors import ReplearnError
from ...planning.serialization import parse
from .results import LARGEST, Result, decoded, read_result, text_of, write_atomically

FORMAT = "replearn-runs-1"
POINTS = 20
DIGITS = 7  # significant ones of every measured number


def pack(results: Iterable[Result]) -> str:
    """The text of the file; runs of one recipe, data set and row stand together."""
    lines: list[str] = []
    ordered = sorted(results, key=lambda result: (str(result.recipe["name"]), result.data))
    for _, group in groupby(ordered, key=lambda result: (result.recipe["name"], result.data)):
        runs = [_fields(thinned(result)) for result in group]
        whole = _shared(runs)
        lines.append(dumps({"format": FORMAT, **whole}))
        labels = dict.fromkeys(run["variant"]["label"] for run in runs)
        for label in labels:
            row = [run for run in runs if run["variant"]["label"] == label]
            common = _shared(row)
            own = {name: value for name, value in common.items() if name not in whole}
            lines.append(dumps(own))
            for run in sorted(row, key=lambda run: int(run["seed"])):
                lines.append(dumps({name: value for name, value in run.items() if name not in common}))
    return "".join(f"{line}\n" for line in lines)


def unpack(text: str, where: str) -> Iterator[Result | ReplearnError]:
    """Every run of a packed file; for a line that can't be read, the error instead."""
    shared: dict[str, Any] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{where}, line {number}"
        try:
            data = parse(line, place, LARGEST)
            if not isinstance(data, dict) or (not shared and data.get("format") != FORMAT):
                raise ReplearnError(f"{place} is not of a file of runs of this version of replearn ({FORMAT}).")
            if "format" in data:
                shared = {name: value for name, value in data.items() if name != "format"}
            elif "seed" not in data:
                shared = {**shared, **data}
            else:
                yield decoded({**shared, **data, "epochs": _rows(data.get("epochs"))})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            named = isinstance(error, ReplearnError) and str(error).startswith(place)
            yield ReplearnError(str(error) if named else f"{place} is not a readable run: {error}")


def read_results(path: str | os.PathLike[str]) -> list[Result]:
    """All runs of a packed file, or the one of a run's own `result.json`."""
    if Path(path).suffix != ".jsonl":
        return [read_result(path)]
    found = []
    for result in unpack(text_of(path), str(path)):
        if isinstance(result, ReplearnError):
            raise result
        found.append(result)
    return found


class Kept:
    """The finished runs of one packed file, which is rewritten when runs are added."""

    def __init__(self, path: Path | None, *, writes: bool = True) -> None:
        self.path, self.writes = path, writes
        there = path is not None and path.exists()
        self.runs = {identity(run): run for run in read_results(path)} if path and there else {}

    def add(self, results: Sequence[Result]) -> None:
        new = {identity(result): result for result in results if result.finished}
        if self.path is not None and self.writes and new.keys() - self.runs.keys():
            self.runs = {**new, **self.runs}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, pack(self.runs.values()))


def identity(result: Result) -> tuple[str, str, str, int]:
    return str(result.recipe["name"]), result.data, str(result.variant["label"]), result.seed


def thinned(result: Result) -> Result:
    """The run with at most `POINTS` epochs; its score, best, time and memory stay."""
    epochs = result.epochs
    if len(epochs) <= POINTS:
        return result
    steps = POINTS - 3
    kept = {round(index * (len(epochs) - 1) / steps) for index in range(steps + 1)}
    kept |= {epochs.index(result.best), max(range(len(epochs)), key=lambda index: epochs[index].peak_memory)}
    chosen = tuple(epochs[index] for index in sorted(kept))
    return replace(result, epochs=chosen, median_seconds=result.epoch_seconds)


def _fields(result: Result) -> dict[str, Any]:
    entries = [epoch.to_dict() for epoch in result.epochs]
    names = entries[0] if entries else ()
    epochs = {name: [_short(entry[name]) for entry in entries] for name in names}
    return {name: _short(value) for name, value in vars(result).items()} | {"epochs": epochs}


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _shared(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields that all runs have alike."""
    return {
        name: value
        for name, value in runs[0].items()
        if name not in ("seed", "epochs") and all(run[name] == value for run in runs)
    }


def _rows(columns: Any) -> list[dict[str, Any]]:
    """Epochs by column, as `pack` writes them, as one object an epoch."""
    if not isinstance(columns, dict) or not all(isinstance(column, list) for column in columns.values()):
        raise ReplearnError("epochs is an object of lists")
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]
