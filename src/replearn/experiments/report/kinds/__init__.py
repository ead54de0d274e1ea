"""The kinds of benchmark files that a report shows: one file each, and this folder is their list.

A kind is a file with two functions: `claims(data)`, whether a file's data is of this kind, and
`show(data, key)`, what it comes to, with figures whose names begin with the key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from ...training.recipe import slug
from ..chart import Case, dot_figure
from ..collecting import Other
from ..svg import Drawing

BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)
MOST = 200  # files
Row = Mapping[str, Any]
Column = str | Callable[[Any], str]
Cost = tuple[float | None, float | None]  # time and memory as ratios to E2E


@dataclass(frozen=True, kw_only=True)
class Table:
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a kind of file makes of one file's data."""

    title: str
    sentence: str  # what it comes to, in one line
    about: str = ""  # how to read the tables
    tables: tuple[Table, ...] = ()
    figures: tuple[Drawing, ...] = ()
    costs: Mapping[tuple[str, str, str], Cost] = field(default_factory=dict)  # by recipe, data and label
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


@cache
def available() -> tuple[Any, ...]:
    return tuple(import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__))


def measured_in(others: Sequence[Other]) -> tuple[list[Measured], list[tuple[Path, str]]]:
    """The files of a known kind, shown, and the paths of all others with the reason."""
    known: list[Measured] = []
    rest: list[tuple[Path, str]] = []
    for other in others:
        data = other.data if isinstance(other.data, dict) else {}
        rows = data.get("rows")
        odd = isinstance(rows, list) and not all(isinstance(row, dict) for row in rows)
        kind = None if odd else next((kind for kind in available() if kind.claims(data)), None)
        if kind is None or len(known) >= MOST:
            rest.append((other.path, "measurements of a kind that a report does not show"))
            continue
        key = f"measured-{slug(other.path.with_suffix('').as_posix()) or 'file'}"
        try:
            found = kind.show(data, key)
        except BROKEN as error:
            rest.append((other.path, f"looks like {kind.__name__.rpartition('.')[2]}, but {error!r}"))
            continue
        said = {"made_on": made_on(data), "command": found.command or command_of(data)}
        known.append(Measured(key=key, title=found.title, path=other.path, found=found, **said))
    often = Counter(entry.title for entry in known)
    return [
        replace(entry, title=f"{entry.title} ({entry.path.stem})") if often[entry.title] > 1 else entry
        for entry in known
    ], rest


def table_of(rows: Sequence[Row], columns: Mapping[str, Column], title: str = "") -> Table:
    """A row a line; columns with nothing to say are left out."""
    cells = {head: tuple(cell(row, column) for row in rows) for head, column in columns.items()}
    kept = {head: texts for head, texts in cells.items() if any(texts)}
    return Table(heads=tuple(kept), rows=tuple(zip(*kept.values(), strict=True)), title=title)


def cell(row: Row, column: Column) -> str:
    """A function of a row, or a field by its path and format (`time.median:.3f`), empty where it is missing."""
    if callable(column):
        return column(row)
    path, _, form = column.partition(":")
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return "" if value is None else format(value, form)


def ratio_figure(
    cases: Sequence[Case], key: str, what: str, legend: Sequence[tuple[str, str, str]], base: str = "E2E"
) -> Drawing:
    """Ratios to a base, which is the rule at 1, with their quartiles."""
    title, about = what.partition(",")[0].capitalize(), f"{what}; the rule is {base}."
    about += " Dashed rings are the paper's." if any(sign == "ring" for *_, sign in legend) else ""
    rule = (1.0, base)
    return dot_figure(
        cases, name=f"{key}-ratio", title=title, about=about, x_title=what, legend_of=legend, rule=rule
    )


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
    if data.get("command") or not data.get("script"):
        return str(data.get("command") or "")
    words = ["python", data["script"]]
    for name, value in (data.get("arguments") or {}).items():
        if value is not None and value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return " ".join([*words, "--out FILE"])
