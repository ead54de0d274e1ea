"""The model families: one file each, and this folder is their list.

A family is a file with a function `describe(block) -> Anatomy | None`. To add one, add a file. It names
the parts that the class has as its library builds it; a part that someone took out is left out here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from torch import nn

from ..anatomy import Anatomy, holds


@cache
def families() -> dict[str, Callable[[nn.Module], Anatomy | None]]:
    """Every family's `describe`, by the name of its file."""
    names = sorted(module.name for module in iter_modules(__path__))
    return {name: import_module(f"{__name__}.{name}").describe for name in names}


def describe(block: nn.Module) -> Anatomy | None:
    """What the block is made of, told by the first family that knows it."""
    for family in families().values():
        try:
            found = family(block)
        except AttributeError:  # its attention or a convolution was exchanged: no longer of this family
            continue
        if found is not None:
            return replace(
                found, parts={role: part for role, part in found.parts.items() if holds(block, part.path)}
            )
    return None
