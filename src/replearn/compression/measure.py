"""Measure what a model costs to run, and how much its outputs agree with another model's."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ..blocks.running import cut, unchanged
from ..costs.recorder import flops_of as operation_flops
from ..errors import ReplearnError
from ..fitting.observe import unpadded
from .activations import Arguments, unfused_attention
from .batches import Batch, Data, device_of
from .offload import Offloader, clock

Metric = Callable[[nn.Module], float]


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of one forward pass on the example batch: seconds, FLOPs, and the parameters."""

    latency: float
    flops: float
    parameters: float

    def __sub__(self, other: Price) -> Price:
        return Price(self.latency - other.latency, self.flops - other.flops, self.parameters - other.parameters)

    def __add__(self, other: Price) -> Price:
        return Price(self.latency + other.latency, self.flops + other.flops, self.parameters + other.parameters)

    def of(self, quantity: str) -> float:
        return float(getattr(self, quantity))


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a model's outputs on held-out batches agree with the original model's.

    `error` is the relative squared error, of logits minus their mean; `divergence` is the KL divergence for
    logits, else the error; `same` is the share of equal decisions, NaN for outputs that decide nothing.
    """

    divergence: float
    same: float
    error: float


def read_metric(metric: Callable[[nn.Module], Any], model: nn.Module) -> Metric:
    """The metric with its return value checked; NaN becomes minus infinity."""

    def measured(model: nn.Module) -> float:
        with unchanged(model):  # a metric may change the mode
            found = metric(model)
        try:
            return float(found)
        except (TypeError, ValueError) as error:
            raise ReplearnError(
                f"metric(model) returned {found!r}: return one number, higher for a better model."
            ) from error

    initial = measured(model)
    if not math.isfinite(initial):
        raise ReplearnError(f"metric(model) is {initial} for the untouched model: return a finite number.")

    def checked(other: nn.Module) -> float:
        value = initial if other is model else measured(other)
        return -math.inf if math.isnan(value) else value

    return checked


def example_of(data: Data, most: int = 64) -> Batch:
    batch = max(data.batches, key=lambda found: found.size)
    size = min(batch.size, most)
    return Batch(cut(batch.inputs, batch.size, 0, size), False, size)


def costs(models: Sequence[nn.Module], data: Data, *, repeats: int = 7) -> list[Price]:
    """The cost of each model; they are timed in turns, so that noise affects all alike."""
    example = example_of(data)
    runs = [partial(data.run, model, example) for model in models]
    times = timed(runs, models[0], repeats, data.offloader)
    return [Price(t, flops_of(run), count(m)) for t, run, m in zip(times, runs, models, strict=True)]


def block_cost(block: nn.Module, arguments: Arguments, repeats: int = 5) -> Price:
    """The cost of one block on one call."""
    (seconds,) = timed([lambda: arguments.run(block)], block, repeats)
    return Price(seconds, flops_of(lambda: arguments.run(block)), count(block))


def parameter_uses(model: nn.Module) -> Counter[int]:
    """The number of modules that hold each parameter, by its id."""
    return Counter(id(p) for module in model.modules() for p in module._parameters.values())


def count(model: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in model.parameters()))


@torch.no_grad()
def flops_of(call: Callable[[], Any]) -> float:
    with unfused_attention(), _Counting() as counting:
        call()
    return float(counting.total)


class _Counting(TorchDispatchMode):
    """Counts FLOPs by torch's formulas; FlopCounterMode registers hooks on modules, which fail on some."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.total += operation_flops(func, args, kwargs or {}, output)
        return output


@torch.no_grad()
def timed(
    calls: Sequence[Callable[[], Any]], model: nn.Module, repeats: int, offloader: Offloader | None = None
) -> list[float]:
    """The least time of each call over rounds in which every call runs once, in alternating order.

    Rounds are added for a second, up to three times as many, until the two least times of each call are within
    2 %. Transfers of the `offloader` are not counted.
    """
    offloader = offloader or Offloader()
    device = offloader.device or device_of(model)

    def once(call: Callable[[], Any]) -> float:
        begin = clock(device) - offloader.transfers.seconds
        call()
        return clock(device) - offloader.transfers.seconds - begin

    for _ in range(3 if device.type == "cuda" else 1):  # warm-up of cuDNN and of the allocator
        for call in calls:
            once(call)
    times: list[list[float]] = [[] for _ in calls]
    begin = time.perf_counter()
    for number in range(3 * repeats):
        order = range(len(calls)) if number % 2 == 0 else reversed(range(len(calls)))
        for i in order:
            times[i].append(once(calls[i]))
        out_of_time = time.perf_counter() - begin > 1.0
        if number + 1 >= repeats and (out_of_time or all(is_settled(found) for found in times)):
            break
    return [min(found) for found in times]


def is_settled(times: Sequence[float], tolerance: float = 0.02) -> bool:
    """True if the two least times agree within the tolerance."""
    least, *others = sorted(times)
    return not others or others[0] <= least * (1 + tolerance)


@torch.no_grad()
def stored_outputs(model: nn.Module, data: Data, batches: Sequence[Batch]) -> list[Tensor]:
    """The model's outputs on batches, offloaded; ReplearnError for NaN."""
    return [data.offloader.store(output) for output in iter_outputs(model, data, batches)]


@torch.no_grad()
def iter_outputs(model: nn.Module, data: Data, batches: Sequence[Batch]) -> Iterator[Tensor]:
    """The model's outputs on batches, one at a time and without padding; ReplearnError for NaN."""
    for batch in batches:
        output = unpadded(main_output(data.run(model, batch)).detach(), batch.tokens)
        if not bool(output.isfinite().all()):
            raise ReplearnError(
                f"{type(model).__name__} gives NaN or infinity on the loader's batches: look at its weights."
            )
        yield output


def main_output(output: Any) -> Tensor:
    """The tensor of a model's output to compare: its logits, else its first floating-point tensor."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    found = logits if isinstance(logits, Tensor) else _first_float(output)
    if found is None:
        raise ReplearnError(
            f"The model returns {type(output).__name__} without a tensor; give forward= that returns one."
        )
    return found


def _first_float(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return next((found for part in parts if (found := _first_float(part)) is not None), None)


CHUNK = 1 << 24  # elements compared at a time


def class_dim(logits: Tensor) -> int:
    """The dimension of the classes: 1 for (batch, classes, height, width), else the last."""
    return 1 if logits.dim() == 4 else -1


def agreement(teacher_outputs: Iterable[Tensor], student_outputs: Iterable[Tensor]) -> Agreement:
    """How the student's outputs agree with the teacher's."""
    divergence = same = squared_error = power = 0.0
    rows, size = 0, 1
    for teacher, student in zip(teacher_outputs, student_outputs, strict=True):
        dim = class_dim(teacher)
        size = teacher.shape[dim]
        sides = (
            side.movedim(dim, -1).reshape(-1, size).split(max(1, CHUNK // size)) for side in (student, teacher)
        )
        for one, two in zip(*sides, strict=True):
            one, two = one.float(), two.to(one.device).float()
            if size > 1:
                kl = F.kl_div(one.log_softmax(-1), two.log_softmax(-1), log_target=True, reduction="sum")
                divergence += float(kl)
                same += float((one.argmax(-1) == two.argmax(-1)).sum())
                one, two = (side - side.mean(-1, keepdim=True) for side in (one, two))
            squared_error += float((one - two).square().sum())
            power += float(two.square().sum())
            rows += len(one)
    error = squared_error / max(power, 1e-30)
    return Agreement(divergence / rows, same / rows, error) if size > 1 else Agreement(error, math.nan, error)
