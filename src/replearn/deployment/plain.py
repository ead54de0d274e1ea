"""What export and INT8 ask of a model: that it is deployed, and not bound to a way of running it."""

from __future__ import annotations

from torch import nn

from ..errors import ReplearnError
from ..fast.graphs.replay import Replayed
from ..fast.inference import Autocast, check_ready
from ..operators._base.operator import Operator


def check_plain(model: nn.Module, verb: str) -> None:
    """A model in eval mode without operators, autocast and CUDA graphs; else ReplearnError. `verb`: "Export"."""
    if isinstance(model, (Replayed, Autocast)):
        option, what = ("graph", "replays CUDA graphs") if isinstance(model, Replayed) else ("dtype", "autocasts")
        raise ReplearnError(
            f"A model deployed with {option}= {what}, which is a way to run it and not to store it. {verb} what "
            f"deploy gives without {option}."
        )
    check_ready(model)
    for name, module in model.named_modules():
        if isinstance(module, Operator):
            raise ReplearnError(
                f"{type(model).__name__} still has operators ({name}). {verb} replearn.deploy(model)."
            )
