"""Time several things in turns: each round runs every one of them once, in an order that rotates.

A machine drifts (clocks, heat, neighbours); what is measured in the same round drifts together, so ratios are
taken round by round and told as their median with the quartiles.
"""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from timeit import timeit

import torch

from ...errors import ReplearnError
from ...fast.graphs.capture import collector_off


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The median of some numbers with their quartiles."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, kw_only=True)
class Timing:
    milliseconds: tuple[float, ...]  # of one run of a body, a number a round

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)

    @property
    def spread(self) -> Spread:
        return spread(self.milliseconds)


def interleave(
    bodies: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 20,
    inner: int = 1,
    warmup: int = 3,
    lead: int = 0,
) -> dict[str, Timing]:
    """Run every body `inner` times in each round, after a warm-up, and time it on the device's own clock.

    `lead` more runs come right before these and are not timed: whoever takes a millisecond would else be charged
    with the caches that the one before it left, and in turns that is always the same one.

    >>> found = interleave({"a": lambda: sum(range(100)), "b": lambda: None}, torch.device("cpu"), rounds=5)
    >>> len(found["a"].milliseconds)
    5
    """
    if not bodies:
        raise ReplearnError("There is nothing to time: give at least one candidate.")
    if rounds < 1 or inner < 1 or warmup < 0 or lead < 0:
        raise ReplearnError(
            f"rounds={rounds}, inner={inner}, warmup={warmup}, lead={lead} can't be measured; rounds and inner "
            "start at 1, the others at 0."
        )
    for body in bodies.values():
        for _ in range(warmup):
            body()
    names = list(bodies)
    found: dict[str, list[float]] = {name: [] for name in names}
    if device.type == "cuda":
        gc.collect()
    with collector_off():  # it would stop whoever happens to be measured
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                for _ in range(lead):
                    bodies[name]()
                found[name].append(elapsed(bodies[name], device, inner) / inner)
    return {name: Timing(milliseconds=tuple(values)) for name, values in found.items()}


def elapsed(body: Callable[[], object], device: torch.device, inner: int) -> float:
    """Milliseconds that `inner` runs take together, from an idle device to an idle device."""
    if device.type != "cuda":
        return 1000 * timeit(body, number=inner)
    # an idle device first: a candidate must not live on the queue that the one before it filled
    torch.cuda.synchronize(device)
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin_event.record()
    for _ in range(inner):
        body()
    end_event.record()
    end_event.synchronize()
    return float(begin_event.elapsed_time(end_event))


def ratio(timing: Timing, base: Timing) -> Spread:
    """How long one takes relative to another, round by round."""
    if len(timing.milliseconds) != len(base.milliseconds):
        raise ReplearnError("Only timings of the same rounds can be compared.")
    return spread([a / b for a, b in zip(timing.milliseconds, base.milliseconds, strict=True)])


def spread(values: Sequence[float]) -> Spread:
    pair = values if len(values) > 1 else 2 * list(values)
    low, middle, high = statistics.quantiles(pair, n=4, method="inclusive")
    return Spread(median=middle, low=low, high=high)
