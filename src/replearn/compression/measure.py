"""The door `measure`: what a model costs to run, and how much it agrees with the untouched one."""

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
from .batches import Batch, Data, device_of
from .calls import Arguments, slow_attention
from .streaming import Stream

Metric = Callable[[nn.Module], float]


@dataclass(frozen=True, slots=True)
class Price:
    """What one forward pass on the example batch takes: seconds, FLOPs, and the parameters."""

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
    """How a model's outputs on held-out batches compare to the untouched model's.

    `error` is the relative squared error, of logits about their mean; `divergence` is Kullback and Leibler's for
    logits, else the error; `same` is the share of equal decisions, NaN where there are none to take.
    """

    divergence: float
    same: float
    error: float


def read_metric(metric: Callable[[nn.Module], Any], model: nn.Module) -> Metric:
    """The metric with what it returns checked; a model that it gives NaN for is the worst there is."""

    def number(judged: nn.Module) -> float:
        with unchanged(judged):  # a metric may set modes
            found = metric(judged)
        try:
            return float(found)
        except (TypeError, ValueError) as error:
            raise ReplearnError(
                f"metric(model) returned {found!r}: return one number, higher for a better model."
            ) from error

    top = number(model)
    if not math.isfinite(top):
        raise ReplearnError(f"metric(model) is {top} for the untouched model: return a finite number.")

    def checked(other: nn.Module) -> float:
        value = top if other is model else number(other)
        return -math.inf if math.isnan(value) else value

    return checked


def example_of(data: Data, most: int = 64) -> Batch:
    batch = max(data.batches, key=lambda found: found.size)
    size = min(batch.size, most)
    return Batch(cut(batch.inputs, batch.size, 0, size), False, size)


def costs(models: Sequence[nn.Module], data: Data, *, repeats: int = 7) -> list[Price]:
    """The cost of each model; they are timed in turns, so that a busy machine treats them alike."""
    example = example_of(data)
    runs = [partial(data.run, model, example) for model in models]
    times = timed(runs, models[0], repeats, data.stream)
    return [Price(t, flops_of(run), count(m)) for t, run, m in zip(times, runs, models, strict=True)]


def block_cost(block: nn.Module, arguments: Arguments, repeats: int = 5) -> Price:
    """The cost of one block on one call."""
    (seconds,) = timed([lambda: arguments.run(block)], block, repeats)
    return Price(seconds, flops_of(lambda: arguments.run(block)), count(block))


def holders(model: nn.Module) -> Counter[int]:
    """In how many places of the model each parameter stands, by its id."""
    return Counter(id(p) for module in model.modules() for p in module._parameters.values())


def count(model: nn.Module) -> float:
    return float(sum(parameter.numel() for parameter in model.parameters()))


@torch.no_grad()
def flops_of(call: Callable[[], Any]) -> float:
    with slow_attention(), _Counting() as counting:
        call()
    return float(counting.total)


class _Counting(TorchDispatchMode):
    """Counts FLOPs by torch's own formulas; FlopCounterMode hangs hooks on modules, which some can't bear."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.total += operation_flops(func, args, kwargs or {}, made)
        return made


@torch.no_grad()
def timed(
    calls: Sequence[Callable[[], Any]], model: nn.Module, repeats: int, stream: Stream | None = None
) -> list[float]:
    """The least time of each call over rounds in which every call runs once; a round goes forth, the next back.

    Rounds are added for a second, up to three times as many, until the two least times of a call are within 2 %.
    The moves of a `stream` are not counted.
    """
    stream = stream or Stream()
    device = stream.device or device_of(model)

    def once(call: Callable[[], Any]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter() - stream.moved.seconds
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - stream.moved.seconds - begin

    for _ in range(3 if device.type == "cuda" else 1):  # cuDNN and the allocator settle in the first calls
        for call in calls:
            once(call)
    times: list[list[float]] = [[] for _ in calls]
    begin = time.perf_counter()
    for number in range(3 * repeats):
        order = range(len(calls)) if number % 2 == 0 else reversed(range(len(calls)))
        for i in order:
            times[i].append(once(calls[i]))
        late = time.perf_counter() - begin > 1.0
        if number + 1 >= repeats and (late or all(settled(found) for found in times)):
            break
    return [min(found) for found in times]


def settled(times: Sequence[float], tolerance: float = 0.02) -> bool:
    """True where the two least times differ by little."""
    least, *others = sorted(times)
    return not others or others[0] <= least * (1 + tolerance)


@torch.no_grad()
def outputs(model: nn.Module, data: Data, batches: Sequence[Batch]) -> list[Tensor]:
    """What the model makes of batches, put away; ReplearnError for NaN."""
    return [data.stream.keep(made) for made in answers(model, data, batches)]


@torch.no_grad()
def answers(model: nn.Module, data: Data, batches: Sequence[Batch]) -> Iterator[Tensor]:
    """The same, one after another as they are asked for; of tokens without the padding."""
    for batch in batches:
        made = unpadded(answer(data.run(model, batch)).detach(), batch.tokens)
        if not bool(made.isfinite().all()):
            raise ReplearnError(
                f"{type(model).__name__} gives NaN or infinity on the loader's batches: look at its weights."
            )
        yield made


def answer(made: Any) -> Tensor:
    """The tensor of a model's output that is compared: its logits, else its first floating-point tensor."""
    logits = made.get("logits") if isinstance(made, Mapping) else getattr(made, "logits", None)
    found = logits if isinstance(logits, Tensor) else _first(made)
    if found is None:
        raise ReplearnError(
            f"The model returns {type(made).__name__} without a tensor; give forward= that returns one."
        )
    return found


def _first(made: Any) -> Tensor | None:
    if isinstance(made, Tensor):
        return made if made.is_floating_point() else None
    values = made.values() if isinstance(made, Mapping) else made if isinstance(made, (tuple, list)) else ()
    return next((found for value in values if (found := _first(value)) is not None), None)


PIECE = 1 << 24  # numbers that are compared at a time


def class_dim(outputs: Tensor) -> int:
    """Where the classes are: behind the samples for images of them, else last."""
    return 1 if outputs.dim() == 4 else -1


def agreement(taught: Iterable[Tensor], made: Iterable[Tensor]) -> Agreement:
    total = same = gaps = powers = 0.0
    rows, size = 0, 1
    for teacher, student in zip(taught, made, strict=True):
        dim = class_dim(teacher)
        size = teacher.shape[dim]
        sides = (
            side.movedim(dim, -1).reshape(-1, size).split(max(1, PIECE // size)) for side in (student, teacher)
        )
        for one, two in zip(*sides, strict=True):
            one, two = one.float(), two.to(one.device).float()
            if size > 1:
                gap = F.kl_div(one.log_softmax(-1), two.log_softmax(-1), log_target=True, reduction="sum")
                total += float(gap)
                same += float((one.argmax(-1) == two.argmax(-1)).sum())
                one, two = (side - side.mean(-1, keepdim=True) for side in (one, two))
            gaps += float((one - two).square().sum())
            powers += float(two.square().sum())
            rows += len(one)
    error = gaps / max(powers, 1e-30)
    return Agreement(total / rows, same / rows, error) if size > 1 else Agreement(error, math.nan, error)
