"""What both kinds of quantization ask of a model."""

from __future__ import annotations

import warnings

from torch import nn

from ...errors import ReplearnError
from ...fast.graphs.replay import Replayed
from ...fast.inference import Autocast, check_ready
from ...operators._base.operator import Operator


def check_quantizable(model: nn.Module) -> None:
    """A plain model in eval mode on the CPU; ReplearnError for anything else."""
    check_ready(model)
    for name, module in model.named_modules():
        if isinstance(module, Operator):
            raise ReplearnError(
                f"{type(model).__name__} still has operators ({name}). Quantize replearn.deploy(model)."
            )
    if isinstance(model, Replayed):
        raise ReplearnError("A model deployed with graph=True can't be quantized: deploy it without.")
    if isinstance(model, Autocast):
        raise ReplearnError("A model deployed with dtype= can't be quantized: deploy it without.")
    devices = {parameter.device.type for parameter in model.parameters()} - {"cpu"}
    if devices:
        raise ReplearnError(
            f"{type(model).__name__} is on {devices.pop()}, and INT8 here is for a CPU. Move it: model.cpu()."
        )


def torchao() -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torchao  # noqa: F401
    except ImportError as error:
        raise ReplearnError("INT8 needs torchao: pip install 'replearn[quant]'.") from error
