"""The recipes: one file each, and this folder is their list.

A recipe is a file with `RECIPE = Recipe(...)` and its claim on top: a docstring with the lines named in
`CLAIM`. To add one, add a file. Files that start with an underscore hold what several recipes share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from ...errors import ReplearnError
from ...planning.serialization import parse
from ..training.recipe import Recipe, recipe_from_dict

CLAIM = ("Command", "Expected", "Seeds", "Hardware", "Time", "Backed by")
UNMEASURED = "not yet measured"


def available() -> tuple[str, ...]:
    """The names of all recipes."""
    return tuple(sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_")))


def recipe(name: str) -> Recipe:
    """The recipe of this name, or of a file: your own `NAME.py`, or the `recipe.json` of a run.

    ReplearnError with the nearest names if there is none.

    >>> recipe("t1_resnet32").epochs
    250
    """
    if name.endswith(".json"):
        try:
            return recipe_from_dict(parse(Path(name).read_text(encoding="utf-8"), "it"))
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ReplearnError(f"Can't read the recipe {name}: {error}.") from error
    found = getattr(_module(name), "RECIPE", None)
    if not isinstance(found, Recipe):
        raise ReplearnError(f"{name} has no RECIPE = Recipe(...), which is what a recipe's file holds.")
    return found


def about(name: str) -> str:
    """What the recipe says of itself, whole: its file's docstring."""
    if name.endswith(".json"):
        return f"The recipe in {name}."
    return (_module(name).__doc__ or "").strip()


def headline(name: str) -> str:
    """The first line of what the recipe says of itself."""
    return about(name).partition("\n")[0]


def claim(name: str) -> Mapping[str, str]:
    """The recipe's claim, by the words of `CLAIM`; a line goes on where it is indented.

    >>> claim("t1_resnet32")["Command"].split()[:2]
    ['replearn', 'compare']
    """
    entries: dict[str, str] = {}
    last = None
    for line in about(name).splitlines():
        word, colon, rest = line.partition(":")
        if colon and word in CLAIM:
            last = word
            entries[word] = rest.strip()
        elif last and re.match(r"\s+\S", line):
            entries[last] += f" {line.strip()}"
        else:
            last = None
    return entries


def _module(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _module_of_file(Path(name))
    names = available()
    if name not in names:
        near = get_close_matches(name, names, n=3)
        hint = f"Did you mean {', '.join(near)}?" if near else f"There are {', '.join(names)}."
        raise ReplearnError(f"There is no recipe {name!r}. {hint}")
    return import_module(f"{__name__}.{name}")


def _module_of_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ReplearnError(f"There is no file {path}.")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ReplearnError(f"{path} can't be read as Python.")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ReplearnError(f"{path} can't be read as a recipe: {type(error).__name__}: {error}.") from error
    return module
