"""What a benchmark's file comes to, as plain data: tables, figures, and numbers beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .scene import Drawing


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as text; columns are right-aligned but those in `left`."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[int, ...] = (0,)
    title: str = ""
    folded: bool = False  # for those who want every number


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What we measured for one row of one of the paper's tables."""

    table: str
    row: int
    reached: str = ""
    time: float | None = None  # ratio to E2E
    memory: float | None = None


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a kind of file makes of one file's data."""

    title: str
    sentence: str  # what it comes to, in one line
    about: str = ""  # how to read the tables
    tables: tuple[Table, ...] = ()
    figures: tuple[Drawing, ...] = ()
    beside: tuple[Beside, ...] = ()
    command: str = ""  # where the file itself does not say how it was made


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One file, shown: where it lies, what was found, on what, and by which command."""

    key: str
    path: Path
    found: Found
    made_on: str
    command: str


def columns(entries: Mapping[str, Sequence[str]], left: Sequence[str], title: str = "") -> Table:
    """A table by columns; those that have nothing to say are left out."""
    kept = {head: tuple(cells) for head, cells in entries.items() if any(cells)}
    places = tuple(index for index, head in enumerate(kept) if head in left)
    return Table(heads=tuple(kept), rows=tuple(zip(*kept.values(), strict=True)), left=places, title=title)


def median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def made_on(data: Mapping[str, Any]) -> str:
    """Hardware and versions, as every benchmark of ours writes them."""
    hardware, versions = data.get("hardware") or {}, data.get("versions") or {}
    if not hardware and isinstance(data.get("about"), Mapping):
        return f"{data['about'].get('device', '?')}, torch {data['about'].get('torch', '?')}"
    threads = hardware.get("threads") or hardware.get("cores")
    machine = str(hardware.get("gpu") or f"{hardware.get('device', '?')}, {threads} threads")
    return ", ".join([machine, *(f"{name} {number}" for name, number in versions.items())])


def command_of(data: Mapping[str, Any]) -> str:
    """The command that made a file: as it was written down, or the script with its arguments."""
    if data.get("command"):
        return str(data["command"])
    if not data.get("script"):
        return ""
    words = [f"python {data['script']}"]
    for name, value in (data.get("arguments") or {}).items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif isinstance(value, list):
            words.append(" ".join([option, *map(str, value)]))
        elif value is not None and value is not False:
            words.append(f"{option} {value}")
    return " ".join([*words, "--out FILE"])
