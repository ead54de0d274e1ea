"""List the classes that the files of a folder define."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def classes_in(package: ModuleType, kind: type[Kind]) -> dict[str, type[Kind]]:
    """Every class of this kind that a file of the package defines with a `name` of its own, by that name."""
    modules = [import_module(f"{package.__name__}.{file.name}") for file in iter_modules(package.__path__)]
    held: list[Any] = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    named = {each.name: each for each in held if issubclass(each, kind) and "name" in vars(each)}
    return dict(sorted(named.items()))
