"""Which models can be stored: plain ones, and by save_pretrained those that load as the same model."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from ..errors import ReplearnError
from ..fast.graphs.replay import Replayed
from ..fast.inference import Autocast, check_ready
from ..operators._base.operator import Operator
from ..surgery.plan_metadata import written_config


def check_plain(model: nn.Module, verb: str) -> None:
    """Raise for train mode, operators, autocast or CUDA graphs; `verb` is for the message, as "Export"."""
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


class RefusedSaving:
    """Replaces the save_pretrained of a model that from_pretrained would load as another one.

    It is pickled as a string, since the pickle of a deployed model must not need this package.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ReplearnError(self.text)

    def __deepcopy__(self, memo: Any) -> RefusedSaving:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("refused: what it writes loads as another model",)


def refuse_saving_(model: nn.Module, instead: str) -> None:
    """Make save_pretrained of a Hugging Face model raise if the model has other tensors than its class."""
    config = written_config(model)
    if config is None:
        return
    try:
        with torch.device("meta"):
            fresh = type(model)(config)
        wanted = {name: tensor.shape for name, tensor in fresh.state_dict().items()}
    except Exception:  # a class that can't be built can't be loaded either
        wanted = {}
    given = {name: tensor.shape for name, tensor in model.state_dict().items()}
    if other := [name for name in (*given, *wanted) if given.get(name) != wanted.get(name)]:
        name = type(model).__name__
        vars(model)["save_pretrained"] = RefusedSaving(
            f"save_pretrained would write a {name} that loads as another model: {other[0]} is not as {name} has "
            f"it. {instead} Or keep this one with torch.save, or export it as pt2 or ONNX."
        )
