"""The door `heal`: train the small model for a while to give what the untouched one gives, without labels."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ReplearnError
from .batches import Augment, Batch, Data, augmented
from .calls import first
from .fit import head_of
from .measure import Agreement, agreement, answer, outputs
from .pool import Pool
from .walking import Way

RATES = (3e-4, 1e-3, 3e-3)
TRIAL = 100  # steps with each rate, at most


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

    Three rates are tried in short annealed runs; the best on held-out batches is annealed over the rest of the
    time. Training ends early where held-out batches have not got better for half of it. The best state is kept:
    neither the divergence nor the share of equal decisions is worse there than before.
    """
    limit, epochs = read_heal(heal)
    begin = time.perf_counter()
    pool = Pool([batch for batch in data.batches if not batch.held_out and not batch.copied])
    held = data.held()
    head = head_of(teacher, way, data)
    taught = outputs(teacher, data, held)
    start = state(student)
    first_seen = agreement(taught, outputs(student, data, held))
    total = math.inf if math.isinf(epochs) else max(1, math.ceil(epochs * len(pool)))

    def spent(done: int) -> float:
        return max(done / total, (time.perf_counter() - begin) / limit)

    def seen() -> Agreement:
        try:
            return agreement(taught, outputs(student, data, held))
        except ReplearnError:  # NaN
            return Agreement(math.inf, 0.0)

    best, least = start, first_seen
    found: dict[float, float] = {}
    used = 0
    steps = TRIAL if math.isinf(total) else int(max(1, min(TRIAL, total / 9)))
    for rate in RATES:  # at most a third of the time goes into finding the rate
        run = Run(student, teacher, data, way, head, rate)
        used += run.steps(pool, steps, augment, passing(steps, limit / 9))
        now = seen()
        found[rate] = now.divergence
        if better(now, least, first_seen):
            best, least = state(student), now
        student.load_state_dict(start)
    rate = min(found, key=lambda item: found[item])
    run = Run(student, teacher, data, way, head, rate)
    opened, done, last = spent(0), 0, spent(0)

    def through(done: int) -> Callable[[int], float]:
        return lambda more: (spent(done + more) - opened) / max(1 - opened, 1e-9)

    while spent(done) < 1 and spent(done) - last < 0.5:
        number = int(min(max(len(pool), 8), total - done))
        done += run.steps(pool, number, augment, through(done))
        now = seen()
        if better(now, least, first_seen):
            best, least, last = state(student), now, spent(done)
        if progress is not None:
            progress(f"healing: {done} steps, divergence {now.divergence:.4f}")
    student.load_state_dict(best)
    student.zero_grad(set_to_none=True)
    return Healing(first_seen.divergence, least.divergence, rate, used + done, time.perf_counter() - begin)


def passing(steps: int, seconds: float) -> Callable[[int], float]:
    """The part of a run that has passed, by its steps or its seconds."""
    begin = time.perf_counter()
    return lambda done: max(done / steps, (time.perf_counter() - begin) / seconds)


def better(now: Agreement, least: Agreement, before: Agreement) -> bool:
    return now.divergence < least.divergence and now.same >= before.same


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

    def steps(self, pool: Pool, number: int, augment: Augment | None, progress: Callable[[int], float]) -> int:
        """Train for so many steps at a rate that falls to nothing as `progress(steps done)` goes to 1."""
        wanted = [p.requires_grad for p in self.parameters]
        modes = {module: module.training for module in self.student.modules()}
        enough = pool.least >= 16
        done = 0
        try:
            for parameter in self.parameters:
                parameter.requires_grad_(True)
            for module in self.student.modules():
                # no dropout, as in the teacher; BatchNorm learns where a batch gives it statistics
                module.training = isinstance(module, nn.modules.batchnorm._BatchNorm) and enough
            while done < number and (passed := progress(done)) < 1:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate * 0.5 * (1 + math.cos(math.pi * max(passed, 0.0)))
                batch = pool.draw()
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
