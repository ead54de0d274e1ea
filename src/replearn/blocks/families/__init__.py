"""The model families: one file each, and this folder is their list.

A family is a file with a function `describe(block) -> Anatomy | None`. To add one, add a file. It names the parts
of the class as its library builds it; parts that the block at hand does not have are dropped here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from torch import nn

from ..anatomy import Anatomy, has_parts


@cache
def families() -> dict[str, Callable[[nn.Module], Anatomy | None]]:
    """Every family's `describe`, by the name of its file."""
    names = sorted(module.name for module in iter_modules(__path__))
    return {name: import_module(f"{__name__}.{name}").describe for name in names}


def describe(block: nn.Module) -> Anatomy | None:
    """The block's anatomy, by the first family that knows its class."""
    for family in families().values():
        try:
            anatomy = family(block)
        except AttributeError:  # its attention or a convolution was exchanged: no longer of this family
            continue
        if anatomy is not None:
            parts = {role: part for role, part in anatomy.parts.items() if has_parts(block, part.path)}
            return replace(anatomy, parts=parts)
    return None
