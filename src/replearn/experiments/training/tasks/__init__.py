"""The tasks: one file each, and this folder is their list.

A task is a file with a class derived from `Task` that has a `name`. To add one, add a file.
"""

import sys
from functools import cache

from ....errors import ReplearnError
from ..listing import classes_in
from .base import Task

__all__ = ["Task", "available", "task_named"]


@cache
def available() -> dict[str, type[Task]]:
    """Every task by name."""
    return classes_in(sys.modules[__name__], Task)  # type: ignore[type-abstract]


def task_named(name: str) -> type[Task]:
    """The task of this name.

    >>> task_named("classification").metric.name
    'accuracy'
    """
    if name not in available():
        raise ReplearnError(f"There is no task {name!r}; there are {', '.join(available())}.")
    return available()[name]
