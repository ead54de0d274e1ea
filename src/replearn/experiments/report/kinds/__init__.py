"""The kinds of benchmark files that a report shows: one file each, and this folder is their list.

A kind is a file with two functions: `claims(data)`, whether a file's data is of this kind, and
`show(data, key)`, what it comes to, with figures whose names begin with the key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from ...training.recipe import slug
from ..collecting import Other
from ..measured import Measured, command_of, made_on

BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)


@cache
def available() -> tuple[Any, ...]:
    return tuple(import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__))


def measured_in(others: Sequence[Other], most: int = 200) -> tuple[list[Measured], list[tuple[Path, str]]]:
    """The files of a known kind, shown, and the paths of all others with the reason."""
    known: list[Measured] = []
    rest: list[tuple[Path, str]] = []
    for other in others:
        data = other.data if isinstance(other.data, dict) else {}
        kind = next((kind for kind in available() if claims(kind, data)), None)
        if kind is None or len(known) >= most:
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


def claims(kind: Any, data: dict[str, Any]) -> bool:
    rows = data.get("rows")
    if isinstance(rows, list) and not all(isinstance(row, dict) for row in rows):
        return False
    return bool(kind.claims(data))
