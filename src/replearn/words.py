"""The names in a module's code: which of its attributes that may read."""

from __future__ import annotations

import inspect
from types import CodeType

from torch import nn


def words_of(module: nn.Module) -> set[str]:
    """Every attribute name in the code of a module's own class, and every text in it, which may be one."""
    words: set[str] = set()
    for kind in type(module).__mro__:
        if kind.__module__.startswith("torch.nn"):
            continue
        for value in vars(kind).values():
            held = getattr(value, "fget", None) or getattr(value, "func", value)  # by a property, cached or not
            code = getattr(inspect.unwrap(held), "__code__", None)
            words |= _words_in(code) if code and code.co_name != "__init__" else set()
    return words


def _words_in(code: CodeType) -> set[str]:
    inner = (_words_in(part) for part in code.co_consts if isinstance(part, CodeType))  # of a comprehension, say
    texts = (part for part in code.co_consts if isinstance(part, str))  # a name may be asked for by getattr
    return set(code.co_names).union(texts, *inner)
