"""Static INT8: weights and activations in eight bits, with scales from calibration data (PT2E, x86 backend)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ReplearnError
from .readiness import check_quantizable, torchao


def quantize_static(model: nn.Module, batches: Iterable[Tensor]) -> nn.Module:
    """Return a copy of a deployed CNN that computes in INT8, its scales set by running it on `batches`.

    The batches are inputs as the model takes them, all of one shape but for the batch size, which stays free.
    Give a model that was deployed without `merge=True`: nothing in a merged one tells, and W + I has one scale for
    ones and small weights alike. Raises ReplearnError for none, for batches of unlike shapes, and for ones that
    the model can't be run on. The result simulates INT8 exactly and slowly; torch.compile turns it into INT8
    kernels.
    """
    check_quantizable(model)
    given = checked(model, batches)
    torchao()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

        first = given[0].repeat(2, *[1] * (given[0].dim() - 1)) if len(given[0]) == 1 else given[0]
        batch = torch.export.Dim("batch", min=1)
        # the quantizer knows the patterns of the strict mode alone
        program = torch.export.export(
            copy.deepcopy(model), (first,), dynamic_shapes=({0: batch},), strict=True
        ).module()
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(program, quantizer)
        for images in given:
            prepared(images)
        made: nn.Module = convert_pt2e(prepared)
    return made


@torch.no_grad()
def checked(model: nn.Module, given: Iterable[Tensor]) -> list[Tensor]:
    """The calibration batches, if the model can be run on each of them."""
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
        if not isinstance(batch, Tensor) or batch.dim() < 2 or not len(batch):
            told = f"shape {tuple(batch.shape)}" if isinstance(batch, Tensor) else type(batch).__name__
            raise ReplearnError(
                f"Calibration batch {index} is no batch of inputs ({told}). Give tensors as the model takes them, "
                "as (64, 3, 224, 224), without labels."
            )
        if batch.shape[1:] != batches[0].shape[1:]:
            raise ReplearnError(
                f"Calibration batch {index} holds inputs of shape {tuple(batch.shape[1:])}, and the first batch "
                f"{tuple(batches[0].shape[1:])}. Only the batch size may differ."
            )
    try:
        model(batches[0][:1])
    except Exception as error:
        raise ReplearnError(
            f"{type(model).__name__} can't be run on the calibration data, whose inputs have the shape "
            f"{tuple(batches[0].shape[1:])}: {str(error).splitlines()[0]}. Give batches as the model takes them."
        ) from error
    for index, batch in enumerate(batches):
        if not bool(batch.isfinite().all()):
            raise ReplearnError(f"Calibration batch {index} holds inf or NaN, from which no scale can be set.")
    return batches
