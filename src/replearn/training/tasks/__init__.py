"""The tasks: one file each, and this folder is their list.

A task is a file with a class derived from `Task` that has a `name`. To add one, add a file.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ...errors import ReplearnError
from .base import Task

__all__ = ["Task", "available", "task_named"]


@cache
def available() -> dict[str, type[Task]]:
    """Every task by name."""
    found: dict[str, type[Task]] = {}
    for file in iter_modules(__path__):
        module = import_module(f"{__name__}.{file.name}")
        for value in vars(module).values():
            mine = inspect.isclass(value) and value.__module__ == module.__name__
            if mine and issubclass(value, Task) and "name" in vars(value):
                found[value.name] = value
    return found


def task_named(name: str) -> type[Task]:
    """The task of this name.

    >>> task_named("classification").metric.name
    'accuracy'
    """
    if name not in available():
        raise ReplearnError(f"There is no task {name!r}; there are {', '.join(available())}.")
    return available()[name]
