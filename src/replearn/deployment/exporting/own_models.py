"""A model of the user's own, made by a function in a file of his."""

from __future__ import annotations

from runpy import run_path
from typing import Any

from torch import nn

from ...errors import ReplearnError


def built_by(place: str) -> tuple[nn.Module, Any]:
    """The model and the example that a function in a file of the user's own returns: FILE.py:FUNCTION."""
    file, _, name = place.rpartition(":")
    try:
        made = run_path(file)[name]()
    except (OSError, KeyError) as error:
        raise ReplearnError(
            f"--model {place}: there is no such file or no function {name!r} in it ({error})."
        ) from error
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise ReplearnError(
            f"--model {place}: the function has to return the fresh model and an example of its input, as "
            "`return model, torch.randn(2, 3, 224, 224)`."
        )
    return made
