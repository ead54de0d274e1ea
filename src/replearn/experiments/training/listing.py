"""A folder as a list: the classes that its files define and name."""

from __future__ import annotations

import inspect
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def classes_in(package: ModuleType, kind: type[Kind]) -> dict[str, type[Kind]]:
    """Every class of this kind that a file of the package defines with a `name` of its own, by that name."""
    found: dict[str, type[Kind]] = {}
    for file in iter_modules(package.__path__):
        module = import_module(f"{package.__name__}.{file.name}")
        for value in vars(module).values():
            mine: Any = value if inspect.isclass(value) and value.__module__ == module.__name__ else None
            if mine is not None and issubclass(mine, kind) and "name" in vars(mine):
                found[mine.name] = mine
    return found
