"""Make any network faster, whether or not its blocks were replaced."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .folding import Fold, find_folds
    from .inference import streamline
    from .synthesis.ahead import synthesized
    from .train.attention_short import short_attention
    from .train.bn_add_relu import fused_norms
    from .train.conv3x3_small import narrow_convolutions
    from .train.overlapped_wgrad import late_weight_gradients

__all__ = [
    "Fold",
    "find_folds",
    "fused_norms",
    "late_weight_gradients",
    "narrow_convolutions",
    "short_attention",
    "streamline",
    "synthesized",
]

_HOME = {
    "Fold": "folding",
    "find_folds": "folding",
    "fused_norms": "train.bn_add_relu",
    "late_weight_gradients": "train.overlapped_wgrad",
    "narrow_convolutions": "train.conv3x3_small",
    "short_attention": "train.attention_short",
    "streamline": "inference",
    "synthesized": "synthesis.ahead",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
