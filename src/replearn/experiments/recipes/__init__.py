"""The recipes: every `Recipe` that a file of this folder holds, one file for each table or theme.

A file's docstring states the claims: lines that begin with the words of `CLAIM`. Lines at the top hold for all
recipes of the file, lines under `## NAME: headline` for one. What is not stated is not yet measured. To add
recipes, add a file. Files that start with an underscore hold what several files share.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from runpy import run_path

from ...errors import ReplearnError
from ...planning.serialization import parse
from ..training.recipe import Recipe, recipe_from_dict

CLAIM = ("Command", "Expected", "Seeds", "Hardware", "Time", "Backed by")
UNMEASURED = "not yet measured"
STATED = rf"^({'|'.join(CLAIM)}): *(.*(?:\n +\S.*)*)\n?"


def available() -> tuple[str, ...]:
    """The names of all recipes."""
    return tuple(sorted(_shipped()))


def recipe(name: str) -> Recipe:
    """The recipe of this name, or of a file: your own `NAME.py` with its RECIPE, or the `recipe.json` of a run.

    ReplearnError with the nearest names if there is none.

    >>> recipe("t1_resnet32").epochs
    250
    """
    if name.endswith(".json"):
        try:
            return recipe_from_dict(parse(Path(name).read_text(encoding="utf-8"), "it"))
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise ReplearnError(f"Can't read the recipe {name}: {error}.") from error
    return _entry(name)[1]


def about(name: str) -> str:
    """What the file's docstring says of this recipe, with its claim, then what it says of all its recipes."""
    if name.endswith(".json"):
        return f"The recipe in {name}."
    parts = _docstring_parts(*_entry(name))
    shared, own = (re.sub(STATED, "", text, flags=re.MULTILINE).strip() for text in parts)
    headline, _, rest = own.partition("\n")
    stated = "\n".join(f"{word}: {text}" for word, text in claim(name).items())
    return "\n\n".join(text for text in (headline, stated, rest.strip(), shared) if text)


def claim(name: str) -> Mapping[str, str]:
    """The recipe's claim, by the words of `CLAIM`; a line goes on where it is indented.

    >>> claim("t1_resnet32")["Command"].split()[:2]
    ['replearn', 'compare']
    """
    doc, found = _entry(name)
    lines = re.findall(STATED, "\n".join(_docstring_parts(doc, found)), flags=re.MULTILINE)
    stated = {word: " ".join(rest.split()) for word, rest in lines}  # the recipe's own lines come last, and count
    return {word: stated.get(word, UNMEASURED).replace("NAME", found.name) for word in CLAIM}


def _docstring_parts(doc: str, found: Recipe) -> tuple[str, str]:
    """What a docstring says before its first `## NAME: headline`, and what it says of this recipe."""
    shared, *parts = re.split(r"^## ", doc.strip(), flags=re.MULTILINE)
    return shared, next((part for part in parts if part.startswith(f"{found.name}:")), "")


@cache
def _shipped() -> dict[str, tuple[str, Recipe]]:
    """Every recipe by name, with the docstring of its file."""
    names = [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
    modules = [import_module(f"{__name__}.{name}") for name in names]
    recipes = [(module.__doc__ or "", held) for module in modules for held in vars(module).values()]
    return {found.name: (doc, found) for doc, found in recipes if isinstance(found, Recipe)}


def _entry(name: str) -> tuple[str, Recipe]:
    if name.endswith(".py"):
        return _from_file(Path(name))
    if name not in _shipped():
        near = get_close_matches(name, available(), n=3)
        hint = f"Did you mean {', '.join(near)}?" if near else f"There are {', '.join(available())}."
        raise ReplearnError(f"There is no recipe {name!r}. {hint}")
    return _shipped()[name]


def _from_file(path: Path) -> tuple[str, Recipe]:
    if not path.is_file():
        raise ReplearnError(f"There is no file {path}.")
    try:
        held = run_path(str(path))
    except Exception as error:
        raise ReplearnError(f"{path} can't be read as a recipe: {type(error).__name__}: {error}.") from error
    if not isinstance(held.get("RECIPE"), Recipe):
        raise ReplearnError(f"{path} has no RECIPE = Recipe(...), which is what a recipe's file holds.")
    return held["__doc__"] or "", held["RECIPE"]
