"""The one error class of the package, other libraries' errors in a line, and libraries that may be missing."""

from importlib import import_module
from typing import Any


class ReplearnError(ValueError):
    """What was given cannot work; the message says why, and what to write instead."""


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def class_and_line(error: Exception) -> str:
    """An error's class, and what it says in one line."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def library(name: str, extra: str) -> Any:
    """An optional library; ReplearnError that names the extra to install."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ReplearnError(f"This needs {name.partition('.')[0]}: pip install 'replearn[{extra}]'.") from error
