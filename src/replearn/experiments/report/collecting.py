"""Find what a folder holds: results, other measurements, what can't be read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ReplearnError
from ...planning.serialization import read_text
from ..training.packed import FORMAT as PACKED
from ..training.packed import unpack
from ..training.results import FORMAT, LARGEST, Result, result_from_json

# ours too, and told by the results they lie beside
BESIDE_RUNS = ("recipe.json", "predictions.json", "log.jsonl")


@dataclass(frozen=True)
class RunFile:
    """One run, by the path of its file below the folder."""

    path: Path
    result: Result

    @property
    def label(self) -> str:
        return str(self.result.variant["label"])

    @property
    def group(self) -> Path:
        """What holds the runs that belong together: a packed file, or the folder above METHOD/seed-N."""
        if self.path.suffix == ".jsonl":
            return self.path
        return self.path.parents[2] if self.path.parent.name.startswith("seed-") else self.path.parent


class Other(NamedTuple):
    """A JSON file of another kind: a benchmark's measurements, say."""

    path: Path
    data: Any


class Unread(NamedTuple):
    path: Path
    reason: str


Found = RunFile | Other | Unread


@dataclass(frozen=True, kw_only=True)
class Collection:
    root: Path
    runs: tuple[RunFile, ...] = ()
    others: tuple[Other, ...] = ()
    unread: tuple[Unread, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.runs or self.others)


def read_folder(root: Path) -> Collection:
    """What is there now. A file that vanishes or is half written meanwhile is named, never an error."""
    if not root.is_dir():
        raise ReplearnError(f"There is no folder {root}; write the one that the runs were trained into.")
    found: list[Found] = []
    for path in files_below(root):
        if path.suffix in (".json", ".jsonl") and path.name not in BESIDE_RUNS:
            with suppress(OSError):  # gone since it was listed
                about = path.stat()
                found += read_file(path, root, (about.st_mtime_ns, about.st_size))
    return Collection(
        root=root,
        runs=tuple(entry for entry in found if isinstance(entry, RunFile)),
        others=tuple(entry for entry in found if isinstance(entry, Other)),
        unread=tuple(entry for entry in found if isinstance(entry, Unread)),
    )


def collect(folder: str | os.PathLike[str]) -> Collection:
    """What a folder holds; ReplearnError if that is nothing a report could show."""
    found = read_folder(Path(folder))
    if not found:
        reasons = "".join(f" {entry.path}: {entry.reason}" for entry in found.unread[:3])
        raise ReplearnError(
            f"There are no results below {folder}; train some with `replearn compare RECIPE`.{reasons}"
        )
    return found


def files_below(root: Path) -> Iterator[Path]:
    """Every file, sorted; links to folders are not followed, hidden names are left out."""
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(folder, name)


@lru_cache(maxsize=10_000)
def read_file(path: Path, root: Path, stamp: tuple[int, int]) -> list[Found]:
    """The run of a result file, every run of a packed one, or a file of another kind.

    A file whose `stamp`, its time and size, did not change is not parsed twice.
    """
    place = path.relative_to(root)
    if not path.resolve().is_relative_to(root.resolve()):
        return [Unread(place, "a link that leads out of the folder")]
    try:
        text = read_text(path, LARGEST)
    except (OSError, UnicodeDecodeError, ReplearnError) as error:
        return [Unread(place, f"can't be read: {error}")]
    if f'"{PACKED}"' in text[:200] and path.suffix == ".jsonl":
        return [
            RunFile(place, run) if isinstance(run, Result) else Unread(place, f"a damaged line: {run}")
            for run in unpack(text, str(place))
        ]
    if not text.strip():
        return [Unread(place, "empty: a run may be writing it just now")]
    try:
        lines = path.suffix == ".jsonl"
        data = {"rows": [json.loads(line) for line in text.splitlines()]} if lines else json.loads(text)
    except (ValueError, RecursionError) as error:
        return [Unread(place, f"not whole JSON ({error}): a run may be writing it just now")]
    version = data.get("format") if isinstance(data, dict) else None
    if not (isinstance(version, str) and version.startswith("replearn-result")):
        return [Other(place, data)]
    if version != FORMAT:
        return [Unread(place, f"a result file of another version ({version}; this one reads {FORMAT})")]
    try:
        return [RunFile(place, result_from_json(text, str(place)))]
    except ReplearnError as error:
        return [Unread(place, f"a damaged result file: {error}")]
