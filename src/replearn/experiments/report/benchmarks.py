"""Files of measurements: a fold for each of a known kind, with figures, tables and the command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..training.recipe import slug
from .collecting import Other
from .kinds import Measured, kind_of
from .markup import Content, Entry, Raw, columns, command, figures, fold, folded, join, tag

BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)
MOST = 200  # files
MOST_ROWS = 24  # a longer table is folded


def measured_in(others: Sequence[Other]) -> tuple[list[Measured], list[tuple[Path, str]]]:
    """The files of a known kind, shown, and the paths of all others with the reason."""
    known: list[Measured] = []
    rest: list[tuple[Path, str]] = []
    for other in others:
        data = other.data if isinstance(other.data, dict) else {}
        show = kind_of(data)
        if show is None or len(known) >= MOST:
            rest.append((other.path, "measurements of a kind that a report does not show"))
            continue
        key = f"measured-{slug(other.path.with_suffix('').as_posix()) or 'file'}"
        try:
            found = show(data, key)
            made = replace(found, key=key, path=other.path, made_on=made_on(data), command=command_of(data))
            known.append(made)
        except BROKEN as error:
            rest.append((other.path, f"looks like {show.__name__}, but {error!r}"))
    often = Counter(entry.title for entry in known)
    return [
        replace(entry, title=f"{entry.title} ({entry.path.stem})") if often[entry.title] > 1 else entry
        for entry in known
    ], rest


def made_on(data: Mapping[str, Any]) -> str:
    """Hardware and versions, as every benchmark of ours writes them."""
    hardware, versions = data.get("hardware") or {}, data.get("versions") or {}
    threads = hardware.get("threads") or hardware.get("cores")
    machine = str(hardware.get("gpu") or f"{hardware.get('device', '?')}, {threads} threads")
    return ", ".join([machine, *(f"{name} {number}" for name, number in versions.items())])


def command_of(data: Mapping[str, Any]) -> str:
    """The command that made a file: as it was written down, or the script with its arguments."""
    rows = data.get("rows") or [{}]  # of several measurements, each with its own command, the first
    if (made := data.get("command") or rows[0].get("command")) or not data.get("script"):
        return str(made or "")
    words = ["python", data["script"]]
    for name, value in (data.get("arguments") or {}).items():
        if value is not None and value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return " ".join([*words, "--out FILE"])


def entries(measured: Sequence[Measured], opened: bool) -> Iterator[Entry]:
    for found in measured:
        parts = [tag("p", found.about, class_="quiet"), figures(found.figures)]
        parts += [_table(title, cells, found.title) for title, cells in found.tables]
        if found.command:
            parts.append(tag("p", command(found.command)))
        made = f"Measured on {found.made_on}. File: {found.path.as_posix()}"
        parts.append(tag("p", made, class_="quiet"))
        yield folded(found.key, found.title, found.path.as_posix(), found.sentence, *parts, opened=opened)


def _table(title: str, cells: Mapping[str, Sequence[Content]], label: str) -> Raw:
    made, rows = columns(cells, title or label), len(next(iter(cells.values())))
    if rows > MOST_ROWS:
        return fold(f"{title or 'Every number'} ({rows} rows)", made)
    return join(tag("h3", title), made) if title else made
