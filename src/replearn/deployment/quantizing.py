"""INT8 for a CPU: quantize a deployed model by torchao."""

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ReplearnError, first_line, library
from .saving import check_plain


def quantize(model: nn.Module, batches: Iterable[Tensor]) -> tuple[nn.Module, str]:
    """INT8 as in the paper: static for a CNN, dynamic for a transformer; returns the kind in words too."""
    convolutions = sum(isinstance(layer, nn.Conv2d) for layer in model.modules())
    if convolutions > 1:  # a ViT has one, for the patches
        return quantize_static(model, batches), "static, calibrated (PT2E, x86)"
    return quantize_dynamic(model), "dynamic, linear layers (torchao)"


def quantize_dynamic(model: nn.Module) -> nn.Module:
    """Return a copy of a deployed transformer whose linear layers compute in INT8; no data is needed.

    Weights are in eight bits; activations are scaled at every call. Give a model that was deployed without
    `merge=True`, which is not checked: W + I has one scale for ones and small weights alike. Raises ReplearnError
    for a model with operators, in train mode or on a GPU, and for one without linear layers. Compile the result:
    without that it is slower than float32.
    """
    check_quantizable(model)
    if not any(type(module) is nn.Linear for module in model.modules()):
        raise ReplearnError(
            f"{type(model).__name__} has no nn.Linear, and dynamic INT8 changes nothing else. For convolutions "
            "use quantize_static(model, batches)."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantized = copy.deepcopy(model)
        quantize_(quantized, Int8DynamicActivationInt8WeightConfig())
    return quantized


def quantize_static(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Return a copy of a deployed CNN that computes in INT8, its scales set by running it on `batches`.

    The batches are inputs as the model takes them, of one shape except for the batch size, which stays free. Give
    a model that was deployed without `merge=True`, as for `quantize_dynamic`. Raises ReplearnError for no batches,
    for batches of different shapes, and for ones that the model can't be run on. The result simulates INT8 slowly;
    torch.compile turns it into INT8 kernels.
    """
    check_quantizable(model)
    given = checked(model, batches)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        first = given[0].repeat(2, *[1] * (given[0].dim() - 1)) if len(given[0]) == 1 else given[0]
        batch = torch.export.Dim("batch", min=1)
        # the quantizer only matches patterns of strict mode
        program = torch.export.export(
            copy.deepcopy(model), (first,), dynamic_shapes=({0: batch},), strict=True
        ).module()
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(program, quantizer)
        for images in given:
            prepared(images)
        return convert_pt2e(prepared)


def check_quantizable(model: nn.Module) -> None:
    """Raise unless the model is plain and on the CPU, and torchao is installed."""
    check_plain(model, "Quantize")
    if devices := {parameter.device.type for parameter in model.parameters()} - {"cpu"}:
        raise ReplearnError(
            f"{type(model).__name__} is on {devices.pop()}, and INT8 here is for a CPU. Move it: model.cpu()."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library("torchao", "quant")


@torch.no_grad()
def checked(model: nn.Module, given: Iterable[Tensor]) -> list[Tensor]:
    """The calibration batches as a list; ReplearnError if the model can't be run on them."""
    if isinstance(given, Tensor) or not isinstance(given, Iterable):
        raise ReplearnError(
            f"Calibration data is a list of batches, and this is one {type(given).__name__}: write [images]."
        )
    others = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32, torch.bfloat16}
    if others:
        raise ReplearnError(
            f"Static INT8 is made of float32 or bfloat16, and {type(model).__name__} has weights in "
            f"{others.pop()}. Convert it first: model.float()."
        )
    batches: list[Any] = list(given)
    if not batches:
        raise ReplearnError(
            "There is no calibration data: give at least one batch of inputs, as [images]; a few hundred images "
            "are usual."
        )
    for index, batch in enumerate(batches):
        wrong = ""
        if not isinstance(batch, Tensor) or batch.dim() < 2 or not len(batch):
            what = f"shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            wrong = f"is no batch of inputs ({what}). Give tensors as the model takes them, without labels"
        elif batch.shape[1:] != batches[0].shape[1:]:
            shapes = tuple(batch.shape[1:]), tuple(batches[0].shape[1:])
            wrong = f"holds inputs of shape {shapes[0]}, and the first {shapes[1]}. Only the batch size may differ"
        elif not bool(batch.isfinite().all()):
            wrong = "holds inf or NaN, from which no scale can be set"
        if wrong:
            raise ReplearnError(f"Calibration batch {index} {wrong}.")
    try:
        model(batches[0][:1])
    except Exception as error:
        raise ReplearnError(
            f"{type(model).__name__} can't be run on the calibration data, whose inputs have the shape "
            f"{tuple(batches[0].shape[1:])}: {first_line(error)}. Give batches as the model takes them."
        ) from error
    return batches
