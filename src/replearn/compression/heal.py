"""The door `heal`: train the small model for a while to give what the untouched one gives, without labels."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ReplearnError
from .batches import Augment, Batch, Data, augmented, cut
from .fit import head_of
from .measure import agreement, answer, outputs
from .trace import first
from .walking import Way

RATES = (1e-4, 3e-4, 1e-3)
PART = 64  # samples in a step
TRIAL = 8  # steps with each rate


@dataclass(frozen=True, slots=True)
class Healing:
    """What training brought: divergence from the untouched model on held-out batches, before and after."""

    before: float
    after: float
    rate: float
    steps: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"healed for {self.steps} steps in {self.seconds:.1f} s at rate {self.rate:g}: divergence "
            f"{self.before:.4f} -> {self.after:.4f}"
        )


def read_heal(given: Any) -> tuple[float, float]:
    """Seconds and epochs: a number is epochs, '30s' seconds."""
    text = str(given).strip().lower()
    try:
        if text.endswith("s") and not text.endswith("epochs"):
            seconds, epochs = float(text[:-1]), math.inf
        else:
            seconds, epochs = math.inf, float(text.removesuffix("epochs").removesuffix("epoch"))
        if min(seconds, epochs) > 0:
            return seconds, epochs
    except ValueError:
        pass
    raise ReplearnError(f"heal={given!r}: write a number of epochs, as 1, or seconds, as '30s'.")


@torch.enable_grad()
def heal_(
    student: nn.Module,
    teacher: nn.Module,
    data: Data,
    way: Way,
    *,
    heal: Any,
    augment: Augment | None = None,
    progress: Callable[[str], None] | None = None,
) -> Healing:
    """Train the student in place: squared error of the last block's features, and KD of the logits.

    The rate is the best of three on held-out batches; training stops when these no longer get better, and the best
    state seen is kept, so that it is never worse there than before.
    """
    limit, epochs = read_heal(heal)
    begin = time.perf_counter()
    batches = [part for batch in data.batches if not batch.held_out for part in parts(batch)]
    held = data.held()
    head = head_of(teacher, way, data)
    taught = outputs(teacher, data, held)
    start = state(student)
    before = agreement(taught, outputs(student, data, held)).divergence
    total = math.inf if math.isinf(epochs) else max(1, math.ceil(epochs * len(batches)))
    trials: dict[float, float] = {}
    for rate in RATES:
        run = Run(student, teacher, data, way, head, rate)
        run.steps(batches, min(TRIAL, len(batches) * 2), augment, deadline=begin + limit / 4)
        trials[rate] = agreement(taught, outputs(student, data, held)).divergence
        student.load_state_dict(start)
    rate = min(trials, key=lambda item: trials[item] if math.isfinite(trials[item]) else math.inf)
    run = Run(student, teacher, data, way, head, rate)
    best, least, stale, done = start, before, 0, 0
    while done < total and time.perf_counter() - begin < limit and stale < 8:
        part = int(min(max(len(batches), 8), total - done))
        left = 1 - max(done / total, (time.perf_counter() - begin) / limit)
        run.slow(left)
        done += run.steps(batches, part, augment, deadline=begin + limit)
        now = agreement(taught, outputs(student, data, held)).divergence
        stale = 0 if now < least else stale + 1
        if now < least:
            best, least = state(student), now
        if progress is not None:
            progress(f"healing: {done} steps, divergence {now:.4f}")
    student.load_state_dict(best)
    student.zero_grad(set_to_none=True)
    return Healing(before, least, rate, done, time.perf_counter() - begin)


def parts(batch: Batch) -> list[Batch]:
    """A batch in equal parts of at most 64 samples: small steps, and more of them."""
    number = math.ceil(batch.size / PART)
    edges = [batch.size * i // number for i in range(number + 1)]
    return [Batch(cut(batch.inputs, batch.size, i, j), False, j - i) for i, j in pairwise(edges)]


def state(model: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(model.state_dict())


class Run:
    """AdamW at one rate; modes are put back after every part."""

    def __init__(
        self, student: nn.Module, teacher: nn.Module, data: Data, way: Way, head: str, rate: float
    ) -> None:
        self.student, self.teacher, self.data, self.rate = student, teacher, data, rate
        self.last = way.blocks[-1]
        frozen = {id(p) for p in student.get_submodule(head).parameters()} if head else set()
        self.parameters = [p for p in student.parameters() if id(p) not in frozen and p.is_floating_point()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=0.0)
        self.random = random.Random(0)

    def slow(self, left: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * (0.05 + 0.95 * max(left, 0.0))

    def steps(self, batches: Sequence[Batch], number: int, augment: Augment | None, deadline: float) -> int:
        wanted = [p.requires_grad for p in self.parameters]
        modes = {module: module.training for module in self.student.modules()}
        enough = min(batch.size for batch in batches) >= 16
        done = 0
        try:
            for parameter in self.parameters:
                parameter.requires_grad_(True)
            for module in self.student.modules():
                # no dropout, as in the teacher; BatchNorm learns where a batch gives it statistics
                module.training = isinstance(module, nn.modules.batchnorm._BatchNorm) and enough
            while done < number and time.perf_counter() < deadline:
                batch = self.random.choice(batches)
                self.step(batch if augment is None else augmented(batch, augment))
                done += 1
        finally:
            for parameter, want in zip(self.parameters, wanted, strict=True):
                parameter.requires_grad_(want)
            for module, mode in modes.items():
                module.training = mode
        return done

    def step(self, batch: Batch) -> None:
        with torch.no_grad():
            features, logits = self.see(self.teacher, batch)
        mine, made = self.see(self.student, batch)
        loss = kd(made, logits)
        loss = loss + F.mse_loss(mine, features) / features.var().clamp_min(1e-12)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()

    def see(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The features that the last block makes, and the logits."""
        seen: list[Tensor] = []

        def note(module: nn.Module, args: Any, made: Any) -> None:
            seen.append(first(made))

        hook = model.get_submodule(self.last).register_forward_hook(note)
        try:
            made = answer(self.data.run(model, batch))
        finally:
            hook.remove()
        return seen[-1], made


def kd(made: Tensor, taught: Tensor, temperature: float = 2.0) -> Tensor:
    """Kullback-Leibler divergence at a temperature, a row; squared error where there is one number a row."""
    dim = 1 if taught.dim() == 4 else -1
    if taught.shape[dim] < 2:
        return F.mse_loss(made, taught) / taught.var().clamp_min(1e-12)
    one, two = (t.float().div(temperature).log_softmax(dim) for t in (made, taught))
    rows = taught.numel() / taught.shape[dim]
    return F.kl_div(one, two, log_target=True, reduction="sum") * temperature**2 / rows
