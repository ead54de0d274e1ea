"""Compare the outputs of two models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.running import call, unchanged
from ..costs.precision import float32_products
from ..errors import ReplearnError, class_and_line

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@torch.no_grad()
def verify(model: nn.Module, plain: nn.Module, example: Any) -> float:
    """The largest relative difference of the two models' outputs. Raises Differs if it is more than rounding."""
    with exact():
        with unchanged(model, private=True), run_on_example(model):
            expected = tensors_in(call(model, example))
        with unchanged(plain, private=True):  # and the same random numbers again
            found = tensors_in(call(plain, example))
    if expected and not any(tensor.numel() for tensor in expected):
        raise ReplearnError(
            "The model's outputs on the example hold no number, as for a batch without a sample, and any two "
            "models agree on that. Give an example of a sample or more."
        )
    return compare(expected, found, "the deployed model")


class Differs(ReplearnError):
    """Two models gave different outputs; `by` is the largest difference relative to an output's largest value."""

    def __init__(self, text: str, by: float | None = None) -> None:
        super().__init__(text)
        self.by = by


_looser: ContextVar[float] = ContextVar("looser", default=0.0)


@contextmanager
def allowing(difference: float) -> Iterator[None]:
    """Inside, differences up to this one count as rounding."""
    token = _looser.set(difference)
    try:
        yield
    finally:
        _looser.reset(token)


@contextmanager
def run_on_example(model: nn.Module) -> Iterator[None]:
    """Raise ReplearnError, which names the example, if the model can't be run on it."""
    try:
        yield
    except ReplearnError:
        raise
    except Exception as error:
        raise ReplearnError(
            f"{type(model).__name__} can't be run on the example ({class_and_line(error)}). Give one as the model "
            "takes it: a tensor, a tuple of arguments or a dict of keywords, on the model's device."
        ) from error


def exact() -> AbstractContextManager[None]:
    """Without TF32 and without cudnn.benchmark."""
    return float32_products(tf32=False, benchmark=False)


def other_batch(example: Any) -> Any:
    """The example with another batch size, in every tensor whose first dimension is that of the first tensor."""
    size = next((len(tensor) for tensor in tensors_in(example) if tensor.dim() and len(tensor)), 0)
    count = size // 2 if size > 3 else size + 1

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != size or not size:
            return tensor
        return tensor[torch.arange(count, device=tensor.device) % size]

    return rebuilt(example, change)


def compare(expected: list[Tensor], found: list[Tensor], what: str, allowed: float | None = None) -> float:
    """The largest difference of two lists of outputs, relative to each output's largest value.

    Raises ReplearnError if it exceeds `allowed`, or the tolerance of the outputs' dtype.
    """
    what = what[0].upper() + what[1:]
    if len(expected) != len(found):
        raise Differs(
            f"{what} differs from the model: it returns {len(found)} tensors, not {len(expected)}. {NOTHING}"
        )
    if not expected:
        raise ReplearnError(
            f"{what} can't be compared: the model returns no tensor, alone or in tuples, lists, dicts and "
            "dataclasses. Leave the example out, or have the model return its tensors in one of them."
        )
    worst, refused, far = 0.0, "", 0.0
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one.shape != other.shape:
            raise Differs(
                f"{what} differs from the model: output {index} has the shape {tuple(other.shape)}, "
                f"not {tuple(one.shape)}. {NOTHING}"
            )
        if not one.dtype.is_floating_point or not one.numel():
            continue
        if not bool(one.isfinite().all()):
            raise ReplearnError(
                f"{what} can't be compared: output {index} of the model itself is inf or NaN on this example. "
                "Give an example that the model can handle, or look at its weights."
            )
        scale = float(one.double().abs().max()) or 1.0
        difference = float((one.double() - other.double().to(one.device)).abs().max()) / scale
        limit = max(TOLERANCE.get(one.dtype, 1e-5), _looser.get()) if allowed is None else allowed
        if not difference <= limit and not difference <= far:
            refused, far = (
                f"output {index} by {difference:.2e} of its largest value, where {limit:.0e} is rounding",
                difference,
            )
        worst = max(worst, difference)
    if refused:
        raise Differs(f"{what} differs from the model: {refused}. {NOTHING}", far)
    return worst


NOTHING = "Nothing was deployed; please report this with the plan."


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in a nest of tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if is_dataclass(value) and not isinstance(value, type):
        return tensors_in([getattr(value, field.name, None) for field in fields(value)])
    return []


def rebuilt(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest with other tensors in it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [rebuilt(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():
            made[key] = rebuilt(item, change)
        return made
    return value
