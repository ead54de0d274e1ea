"""The door `heal`: train the small model for a while to give what the untouched one gives, without labels.

The loss is the squared error of the last block's features, before a classifier that stays: KD of the logits on top
overfits few samples. Where no classifier has a weight of its own, as with tied embeddings, KD is added. The rate
warms up and falls in a cosine over the time that is given; its peak is found in short annealed runs by the loss on
held-out samples. Half of the images are mixed in pairs. BatchNorm is trained with batches of at least 16 samples,
and then the features of all blocks count; with smaller ones it is frozen. SGD trains networks that are left with
blocks of layers and BatchNorm alone, AdamW all others.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import ReplearnError
from ..fast.graphs.capture import capture
from ..fitting.closed_form import estimate_statistics_
from ..fitting.observe import first, unpadded
from ..operators._base.layers import foldable
from .batches import Augment, Batch, Data, augmented, copy_into, device_of, moved, subset
from .fit import head_of
from .measure import answer
from .pool import Pool
from .walking import Way

RATES = {"SGD": 0.3, "AdamW": 1e-3}  # where BatchNorm is trained
RATE = 3e-4  # elsewhere
BETWEEN = 0.2  # the weight of a block's features beside those of the last one
TRIAL = 100  # steps of a trial, at most
TELLING = 20  # steps from which on a trial tells rates apart
PART = 1 / 30  # of the time, or of the steps, for a trial
LOOKS = 4  # at held-out samples during a run
PATIENCE = 0.6  # of a run without a gain end it
WARM_UP = 0.05
SMALL = 16  # samples of a batch, by fewer of which BatchNorm does not normalise
JUDGED = 512  # held-out samples, and as many for BatchNorm statistics

Seen = tuple[Sequence[Tensor], Tensor]  # features of blocks, and logits


@dataclass(frozen=True, slots=True)
class Healing:
    """What training brought: its loss on held-out batches, before and after."""

    before: float
    after: float
    rate: float
    steps: int
    seconds: float
    batchnorm: str = ""  # 'trained', 'frozen', or '' without any
    mixed: bool = False  # half of the images were mixed in pairs

    def __str__(self) -> str:
        how = [f"rate {self.rate:g}"]
        how += [f"BatchNorm {self.batchnorm}"] if self.batchnorm else []
        how += ["images mixed"] if self.mixed else []
        return (
            f"healed for {self.steps} steps in {self.seconds:.1f} s ({', '.join(how)}): held-out loss "
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
    """Train the student in place, for epochs or seconds; trials of rates take up to a tenth of that.

    The state with the least loss on held-out samples is kept: never one that is worse than the start. A run
    ends early where it has brought nothing for a while. The order of samples follows torch's seed.
    """
    limit, epochs = read_heal(heal)
    begin = time.perf_counter()
    pool = Pool([*(b for b in data.batches if not b.held_out and not b.copied), *data.more], device_of(student))
    total = math.inf if math.isinf(epochs) else max(1, math.ceil(epochs * len(pool)))
    frozen = head_of(teacher, way, data)
    logits = 0.0 if frozen else 1.0
    judge = Judge(student, teacher, data, way.blocks, logits)
    with torch.no_grad():
        before = judge.judged()
    images = any(isinstance(leaf, Tensor) and leaf.dim() == 4 for leaf in tree_leaves(pool.draw().inputs))
    live = bool(judge.norms) and pool.least >= SMALL
    start = before_realignment(student, teacher, judge.gone) if live else state(student)
    used = 0

    def run(peak: float, most: float, seconds: float, looks: int) -> float:
        """One annealed run from where the student is; its loss on held-out samples."""
        nonlocal used
        opened, done = time.perf_counter(), 0
        steps.restart()
        own, last, now = math.inf, 0.0, math.inf

        def passed() -> float:
            return max(done / most, (time.perf_counter() - opened) / seconds)

        for look in range(1, looks + 1):
            while (at := passed()) < look / looks:
                batch = pool.draw()
                batch = batch if augment is None else augmented(batch, augment)
                batch = augmented(batch, mixed) if images else batch
                steps.step(batch, peak * min(1.0, (at + 1 / most) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * at)))
                done += 1
                if not math.isinf(seconds) and done % 8 == 0:
                    steps.wait()
            now = judge.look()
            own, last = (now, passed()) if now < own else (own, last)
            if progress is not None and looks > 1:
                progress(f"healing: {done} steps, held-out loss {now:.4f}")
            if passed() - last > PATIENCE or passed() >= 1:
                break
        used += done
        return now

    with eval_and_grad(student):
        steps = Steps(judge, teacher, frozen, live, live and not judge.added)
        steps.capture(pool.draw())
        most = TRIAL if math.isinf(total) else max(1, min(TRIAL, math.ceil(total * PART)))
        ends: dict[float, dict[str, Any]] = {}

        def trial(peak: float) -> float:
            student.load_state_dict(start)
            loss = run(peak, most, limit * PART, 1)
            ends[peak] = state(student)
            return loss

        rate = RATES[steps.name] if live else RATE
        loss = trial(rate)
        if used >= TELLING:
            rate = best_rate(trial, rate, loss)
        student.load_state_dict(ends[rate])
        run(rate, total, max(limit - (time.perf_counter() - begin), 1e-3), LOOKS)
    student.load_state_dict(judge.best)
    student.zero_grad(set_to_none=True)
    norms = ("trained" if live else "frozen") if judge.norms else ""
    spent = time.perf_counter() - begin
    return Healing(before, judge.least, rate, used, spent, norms, images)


def best_rate(trial: Callable[[float], float], rate: float, loss: float) -> float:
    """The rate of the least loss: this one, a third of it, and one more on the better one's side."""
    found = {rate: loss, rate / 3: trial(rate / 3)}
    beside = rate / 10 if found[rate / 3] < loss else 3 * rate
    found[beside] = trial(beside)
    return min(found, key=found.__getitem__)


def before_realignment(student: nn.Module, teacher: nn.Module, gone: Sequence[str]) -> dict[str, Any]:
    """The student's state with the teacher's weights in all that stayed."""
    untouched, places = teacher.state_dict(), tuple(f"{name}." for name in gone)
    return {k: value if k.startswith(places) else untouched[k].clone() for k, value in state(student).items()}


class Judge:
    """Looks at the student on held-out samples, and keeps the state with the least loss there."""

    def __init__(
        self, student: nn.Module, teacher: nn.Module, data: Data, blocks: Sequence[str], logits: float
    ) -> None:
        few = subset(data, JUDGED)
        self.student, self.data, self.logits = student, data, logits
        places = {name: (student.get_submodule(name), teacher.get_submodule(name)) for name in blocks}
        gone = {name: own for name, (own, block) in places.items() if type(own).__name__ != type(block).__name__}
        passing = {name for name, own in gone.items() if not any(True for _ in own.parameters())}
        self.gone, self.added = tuple(gone), len(gone) > len(passing)
        self.last = blocks[-1:]
        self.blocks = (*(name for name in blocks[:-1] if name not in passing), *self.last)
        self.held = few.held()
        self.clean = [batch for batch in few.batches if not batch.held_out and batch.size > 1]
        with torch.no_grad():
            self.taught = [self.see(teacher, batch, self.last) for batch in self.held]
        self.norms = [module for module in student.modules() if foldable(module)]
        self.least, self.best = math.inf, state(student)

    @torch.no_grad()
    def look(self) -> float:
        """The loss now or with BatchNorm statistics measured anew, whichever is less."""
        now = self.judged()
        if self.norms and self.clean:
            kept = [copy.deepcopy(norm.state_dict()) for norm in self.norms]
            calls = [partial(self.data.run, batch=batch) for batch in self.clean]
            estimate_statistics_(self.student, calls)
            now = min(now, self.judged())
            for norm, values in zip(self.norms, kept, strict=True):
                norm.load_state_dict(values)
        return now

    def judged(self) -> float:
        seen = [self.see(self.student, batch, self.last) for batch in self.held]
        pairs = list(zip(seen, self.taught, self.held, strict=True))
        now = sum(float(loss_of(mine, aim, self.logits)) * batch.size for mine, aim, batch in pairs)
        now = now / sum(batch.size for batch in self.held) if math.isfinite(now) else math.inf
        if now < self.least:
            self.least, self.best = now, state(self.student)
        return now

    def see(self, model: nn.Module, batch: Batch, blocks: Sequence[str]) -> Seen:
        """The features that these blocks make, and the logits; without padding."""
        seen: list[Tensor] = []

        def note(module: nn.Module, args: Any, made: Any) -> None:
            seen.append(unpadded(first(made), batch.tokens))

        with ExitStack() as hooks:
            for name in blocks:
                hooks.enter_context(model.get_submodule(name).register_forward_hook(note))
            made = answer(self.data.run(model, batch))
        return seen, unpadded(made, batch.tokens)


class Steps:
    """Training steps of one kind; on a GPU they are replayed as a CUDA graph where they can be."""

    def __init__(self, judge: Judge, teacher: nn.Module, frozen: str, live: bool, sgd: bool) -> None:
        self.judge, self.teacher = judge, teacher
        self.norms = judge.norms if live else []
        self.blocks = judge.blocks if live else judge.last
        student = judge.student
        still = {id(p) for p in student.get_submodule(frozen).parameters()} if frozen else set()
        self.parameters = [p for p in student.parameters() if id(p) not in still and p.is_floating_point()]
        self.device = device_of(student)
        self.cuda = self.device.type == "cuda"
        rate: Any = torch.zeros((), device=self.device) if self.cuda else 0.0
        self.optimizer: torch.optim.Optimizer
        if sgd:
            self.optimizer = torch.optim.SGD(self.parameters, rate, momentum=0.9, nesterov=True, fused=self.cuda)
            for parameter in self.parameters:
                self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        else:
            self.optimizer = torch.optim.AdamW(self.parameters, rate, weight_decay=0.0, capturable=self.cuda)
        self.name = type(self.optimizer).__name__
        self.buffers: Batch | None = None  # what the captured step reads
        self.launch: Callable[[], None] | None = None

    def restart(self) -> None:
        """Forget what the optimizer has seen."""
        for known in self.optimizer.state.values():
            for value in known.values():
                value.zero_()

    def capture(self, batch: Batch) -> None:
        """Capture a step on a GPU, for batches without padding; the steps that this takes have a rate of 0."""
        if not self.cuda:
            return
        inputs = tree_map_only(Tensor, Tensor.clone, moved(batch.inputs, self.device))
        self.buffers = Batch(inputs, False, batch.size)
        if self.buffers.tokens is not None:  # kept from here on: a capture can't look
            return
        self._set(0.0)
        try:
            pool, body = torch.cuda.graph_pool_handle(), partial(self._body, self.buffers)
            self.launch, _ = capture(type(self.judge.student).__name__, body, self.device, pool)
        except ReplearnError:
            self.launch = None  # its code can't be captured

    def step(self, batch: Batch, rate: float) -> None:
        self._set(rate)
        fits = self.buffers is not None and batch.tokens is None and copy_into(batch.inputs, self.buffers.inputs)
        if self.launch is not None and fits:
            self.launch()
        else:
            self._body(batch)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _set(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if self.cuda:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _body(self, batch: Batch) -> None:
        for norm in self.norms:
            norm.training = True
        with torch.no_grad():
            aim = self.judge.see(self.teacher, batch, self.blocks)
        loss = loss_of(self.judge.see(self.judge.student, batch, self.blocks), aim, self.judge.logits)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        for norm in self.norms:
            norm.training = False


def loss_of(mine: Seen, aim: Seen, logits: float) -> Tensor:
    pairs = ((a.float(), b.float()) for a, b in zip(mine[0], aim[0], strict=True))
    *between, last = (F.mse_loss(a, b) / b.var().clamp_min(1e-12) for a, b in pairs)
    loss = last + BETWEEN * sum(between)
    return loss + logits * kd(mine[1], aim[1]) if logits else loss


@contextmanager
def eval_and_grad(student: nn.Module) -> Iterator[None]:
    """No dropout, as in the teacher, and gradients for all parameters, which is put back."""
    student.eval()
    wanted = {p: p.requires_grad for p in student.parameters() if p.is_floating_point()}
    try:
        for parameter in wanted:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, want in wanted.items():
            parameter.requires_grad_(want)


def state(model: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(model.state_dict())


def mixed(x: Tensor) -> Tensor:
    """Half of the images mixed with others of the batch: inputs for which the teacher has an answer too."""
    share = torch.rand(len(x), *[1] * (x.dim() - 1), device=x.device, dtype=x.dtype)
    share[: len(x) // 2] = 1
    return x * share + x.flip(0) * (1 - share)


def kd(made: Tensor, taught: Tensor, temperature: float = 2.0) -> Tensor:
    """Kullback-Leibler divergence at a temperature, a row; squared error where there is one number a row."""
    dim = 1 if taught.dim() == 4 else -1
    if taught.shape[dim] < 2:
        return F.mse_loss(made, taught) / taught.var().clamp_min(1e-12)
    one, two = (t.float().div(temperature).log_softmax(dim) for t in (made, taught))
    rows = taught.numel() / taught.shape[dim]
    return F.kl_div(one, two, log_target=True, reduction="sum") * temperature**2 / rows
