"""Room four: turn a replaced model into an ordinary one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ReplearnError
from .similarity import call, unchanged
from .surgery import PLAN, operators_of, plan_of, set_submodule

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def deploy(model: nn.Module, example: Any = None) -> nn.Module:
    """Return a new model in eval mode whose operators are plain modules; `model` is not touched.

    The outputs are those of `model.eval()`: BatchNorm is folded into convolutions and scales into linear
    layers, exactly. Give an `example` (a tensor, a tuple of arguments or a dict of keywords) to have both
    models run on it and compared; a difference beyond rounding raises ReplearnError.

    >>> import replearn, torch
    >>> model = replearn.models.resnet32()
    >>> _ = replearn.replace_(model, replearn.plan(model))
    >>> plain = replearn.deploy(model, example=torch.randn(2, 3, 32, 32))
    """
    plan_of(model)
    plain = copy.deepcopy(model).eval()
    delattr(plain, PLAN)
    for name, operator in list(operators_of(plain)):
        set_submodule(plain, name, operator.fuse())
    if example is not None:
        verify(model, plain, example)
    return plain


@torch.no_grad()
def verify(model: nn.Module, plain: nn.Module, example: Any) -> float:
    """The largest relative difference of the two models' outputs; ReplearnError if it is not rounding."""
    with unchanged(model):
        expected = tensors_in(call(model, example))
    found = tensors_in(call(plain, example))
    if len(expected) != len(found):
        raise ReplearnError(
            f"The deployed model differs from the model: it returns {len(found)} tensors, not {len(expected)}. "
            "Nothing was deployed; please report this with the plan."
        )
    worst = 0.0
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.shape != other.shape:
            raise ReplearnError(
                f"The deployed model differs from the model: output {index} has the shape {tuple(other.shape)}, "
                f"not {tuple(one.shape)}. Nothing was deployed; please report this with the plan."
            )
        if not one.dtype.is_floating_point or not one.numel():
            continue
        scale = float(one.double().abs().max()) or 1.0
        difference = float((one.double() - other.double()).abs().max()) / scale
        allowed = TOLERANCE.get(one.dtype, 1e-5)
        if not difference <= allowed:
            raise ReplearnError(
                f"The deployed model differs from the model: output {index} by {difference:.2e} of its largest "
                f"value, where {allowed:.0e} is rounding. Nothing was deployed; please report this with the plan."
            )
        worst = max(worst, difference)
    return worst


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a model's output, whatever it is nested in."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []
