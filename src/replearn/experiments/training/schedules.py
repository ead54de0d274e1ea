"""Learning rates, as a pure function of the step."""

from __future__ import annotations

import math

from ...errors import ReplearnError
from .recipe import Schedule


def rate_at(schedule: Schedule, step: int, steps: int, steps_per_epoch: int) -> float:
    """The learning rate at a step, as a share of the peak.

    Warm-up rises linearly from 1/n to 1 over its n steps; the rest of the run follows the curve.

    >>> rate_at(Schedule(warmup_epochs=1), step=0, steps=100, steps_per_epoch=10)
    0.1
    """
    warmup = round(schedule.warmup_epochs * steps_per_epoch)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        return schedule.final + (1 - schedule.final) * (1 + math.cos(math.pi * progress)) / 2
    if schedule.name == "poly":
        return schedule.final + (1 - schedule.final) * float((1 - progress) ** schedule.power)
    if schedule.name == "step":
        return float(0.1 ** sum(step / steps >= milestone for milestone in schedule.milestones))
    raise ReplearnError(f"There is no schedule {schedule.name!r}; write cosine, constant, poly or step.")
