"""What a benchmark's file comes to, as plain data: tables, figures, and numbers beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .scene import Drawing

Row = Mapping[str, Any]
Column = str | Callable[[Any], str]


@dataclass(frozen=True, kw_only=True)
class Table:
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    folded: bool = False  # for those who want every number


@dataclass(frozen=True, kw_only=True)
class Beside:
    """What we measured for one row of one of the paper's tables."""

    table: str
    row: int
    reached: str = ""
    run: tuple[str, str, str] = ("", "", "")  # recipe, data and label of the run whose costs these are
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
    title: str  # unique in a report
    path: Path
    found: Found
    made_on: str
    command: str


def table_of(rows: Sequence[Row], columns: Mapping[str, Column], title: str = "", folded: bool = False) -> Table:
    """A row a line. A column is a function of a row, or a field by its path and format: `time.median:.3f`.

    Missing fields are empty, and columns with nothing to say are left out.
    """
    cells = {head: tuple(cell(row, column) for row in rows) for head, column in columns.items()}
    kept = {head: texts for head, texts in cells.items() if any(texts)}
    lines = tuple(zip(*kept.values(), strict=True))
    return Table(heads=tuple(kept), rows=lines, title=title, folded=folded)


def cell(row: Row, column: Column) -> str:
    if callable(column):
        return column(row)
    path, _, form = column.partition(":")
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return "" if value is None else format(value, form)


def span(values: Sequence[float], form: str = ".2f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}" if values else "nothing"


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
