"""The methods: one file each, and this folder is their list.

A method is a file with a class derived from `Method` that has the file's name. To add one, add a file.
"""

import sys
from functools import cache

from ....errors import ReplearnError
from ..listing import classes_in
from .base import Method, Setting
from .wrapping import Combined

__all__ = ["Method", "Setting", "available", "has_targets", "method_for"]


@cache
def available() -> dict[str, type[Method]]:
    """Every method by name."""
    return classes_in(sys.modules[__name__], Method)  # type: ignore[type-abstract]


def has_targets(method: str) -> bool:
    """True if the method, or one of several joined by `+`, replaces or removes blocks."""
    parts = (available().get(name) for name in method.split("+"))
    return any(part is not None and part.has_targets for part in parts)


def method_for(setting: Setting) -> Method:
    """The method that the setting's variant names, or several joined by `+`.

    >>> from replearn.experiments.training.recipe import Variant
    >>> method_for(Setting(Variant(label="RepL", method="repl+checkpointing"), seed=0)).name
    'repl+checkpointing'
    """
    text = setting.variant.method
    names = [name.strip() for name in text.split("+")]
    for name in names:
        if name not in available():
            raise ReplearnError(
                f"There is no method {name!r} (in {text!r}); there are {', '.join(available())}, and several "
                "joined by '+', as 'repl+checkpointing'."
            )
        if names.count(name) > 1:
            raise ReplearnError(f"{text!r} names {name} twice; once is enough.")
    parts = [available()[name](setting) for name in names]
    return parts[0] if len(parts) == 1 else Combined(setting, parts)
