"""Faster training steps and inference for any network, replaced or not."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .folding import Fold, find_folds
    from .inference import streamline
    from .train.accelerate import accelerate

__all__ = ["Fold", "accelerate", "find_folds", "streamline"]

_HOME = {
    "Fold": "folding",
    "accelerate": "train.accelerate",
    "find_folds": "folding",
    "streamline": "inference",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
