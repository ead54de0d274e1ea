"""Heal: train the compressed model for a while towards the teacher's outputs, without labels.

The loss is the squared error of the last block's features, before a classifier that is frozen: KD of the logits on
top overfits few samples. If the classifier has no weight of its own, as with tied embeddings, KD is added. The
learning rate warms up and decays in a cosine over the given time; short annealed trials choose its peak by the
loss on held-out samples. Half of the images are mixed in pairs. BatchNorm is trained with batches of at least 16
samples, and then the features of all blocks are in the loss; with smaller batches it is frozen. SGD trains
networks with BatchNorm in which nothing replaces the removed blocks, AdamW all others.
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
from .batches import Augment, Batch, Data, augment_batch, copy_into, device_of, subset, to_device
from .blockwise import BlockOrder
from .fit import find_classifier
from .measure import main_output
from .random_batches import RandomBatches

RATES = {"SGD": 0.3, "AdamW": 1e-3}  # initial peaks where BatchNorm is trained
RATE = 3e-4  # elsewhere
FEATURE_WEIGHT = 0.2  # of other blocks' features in the loss; the last block's have 1
MAX_TRIAL_STEPS = 100
MIN_TRIAL_STEPS = 20  # shorter trials can't rank learning rates
TRIAL_SHARE = 1 / 30  # of the time, or of the steps, for a trial
EVALUATIONS = 4  # on held-out samples during a run
PATIENCE = 0.6  # the share of a run without a gain after which it ends
WARM_UP = 0.05
MIN_NORM_BATCH = 16  # smaller batches have no useful BatchNorm statistics
NUM_SAMPLES = 512  # held-out samples for the loss, and as many for BatchNorm statistics

Outputs = tuple[Sequence[Tensor], Tensor]  # features of blocks, and logits


@dataclass(frozen=True, slots=True)
class Healing:
    """The result of training: the loss on held-out batches before and after."""

    before: float
    after: float
    rate: float
    steps: int
    seconds: float
    batchnorm: str = ""  # 'trained', 'frozen', or '' without BatchNorm
    mixed: bool = False  # mixup on half of the images

    def __str__(self) -> str:
        how = [f"rate {self.rate:g}"]
        how += [f"BatchNorm {self.batchnorm}"] if self.batchnorm else []
        how += ["images mixed"] if self.mixed else []
        return (
            f"healed for {self.steps} steps in {self.seconds:.1f} s ({', '.join(how)}): held-out loss "
            f"{self.before:.4f} -> {self.after:.4f}"
        )


def read_heal(given: Any) -> tuple[float, float]:
    """The limits (seconds, epochs) of `heal`, one of them infinite: a number is epochs, '30s' seconds."""
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
    order: BlockOrder,
    *,
    heal: Any,
    augment: Augment | None = None,
    progress: Callable[[str], None] | None = None,
) -> Healing:
    """Train the student in place, for epochs or seconds; trials of learning rates take up to a tenth of that.

    The state with the least held-out loss is kept, which may be the initial one. A run ends early after a while
    without a gain. The order of samples follows torch's seed.
    """
    limit, epochs = read_heal(heal)
    start = time.perf_counter()
    fitting = (batch for batch in data.batches if not batch.held_out and not batch.copied)
    batches = RandomBatches([*fitting, *data.extra], device_of(student))
    total = math.inf if math.isinf(epochs) else max(1, math.ceil(epochs * len(batches)))
    classifier = find_classifier(teacher, order, data)
    logits = 0.0 if classifier else 1.0
    evaluator = Evaluator(student, teacher, data, order.blocks, logits)
    with torch.no_grad():
        before = evaluator.loss()
    images = any(isinstance(leaf, Tensor) and leaf.dim() == 4 for leaf in tree_leaves(batches.draw().inputs))
    train_norms = bool(evaluator.norms) and batches.smallest >= MIN_NORM_BATCH
    initial = before_realignment(student, teacher, evaluator.replaced) if train_norms else state(student)
    num_steps = 0

    def run(peak: float, most: float, seconds: float, evaluations: int) -> float:
        """One annealed run from the student's present state; returns its loss on held-out samples."""
        nonlocal num_steps
        began, done = time.perf_counter(), 0
        trainer.restart()
        best, best_at, loss = math.inf, 0.0, math.inf

        def elapsed() -> float:
            return max(done / most, (time.perf_counter() - began) / seconds)

        for number in range(1, evaluations + 1):
            while (t := elapsed()) < number / evaluations:
                batch = batches.draw()
                batch = batch if augment is None else augment_batch(batch, augment)
                batch = augment_batch(batch, mixed) if images else batch
                trainer.step(batch, peak * min(1.0, (t + 1 / most) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * t)))
                done += 1
                if not math.isinf(seconds) and done % 8 == 0:
                    trainer.wait()
            loss = evaluator.best_loss()
            best, best_at = (loss, elapsed()) if loss < best else (best, best_at)
            if progress is not None and evaluations > 1:
                progress(f"healing: {done} steps, held-out loss {loss:.4f}")
            if elapsed() - best_at > PATIENCE or elapsed() >= 1:
                break
        num_steps += done
        return loss

    with eval_and_grad(student):
        trainer = Trainer(evaluator, teacher, classifier, train_norms, train_norms and not evaluator.has_maps)
        trainer.capture(batches.draw())
        most = math.ceil(min(MAX_TRIAL_STEPS, total * TRIAL_SHARE))
        ends: dict[float, dict[str, Any]] = {}

        def trial(peak: float) -> float:
            student.load_state_dict(initial)
            loss = run(peak, most, limit * TRIAL_SHARE, 1)
            ends[peak] = state(student)
            return loss

        rate = RATES[trainer.name] if train_norms else RATE
        loss = trial(rate)
        if num_steps >= MIN_TRIAL_STEPS:
            rate = best_rate(trial, rate, loss)
        student.load_state_dict(ends[rate])
        run(rate, total, max(limit - (time.perf_counter() - start), 1e-3), EVALUATIONS)
    student.load_state_dict(evaluator.best_state)
    student.zero_grad(set_to_none=True)
    norms = ("trained" if train_norms else "frozen") if evaluator.norms else ""
    seconds = time.perf_counter() - start
    return Healing(before, evaluator.least, rate, num_steps, seconds, norms, images)


def best_rate(trial: Callable[[float], float], rate: float, loss: float) -> float:
    """The rate with the least loss among this one, a third of it, and one more on the better side."""
    losses = {rate: loss, rate / 3: trial(rate / 3)}
    other = rate / 10 if losses[rate / 3] < loss else 3 * rate
    losses[other] = trial(other)
    return min(losses, key=losses.__getitem__)


def before_realignment(student: nn.Module, teacher: nn.Module, replaced: Sequence[str]) -> dict[str, Any]:
    """The student's state, with the teacher's weights outside of replaced blocks."""
    original, prefixes = teacher.state_dict(), tuple(f"{name}." for name in replaced)
    return {k: value if k.startswith(prefixes) else original[k].clone() for k, value in state(student).items()}


class Evaluator:
    """Measures the student's loss on held-out samples, and keeps the state with the least."""

    def __init__(
        self, student: nn.Module, teacher: nn.Module, data: Data, blocks: Sequence[str], logits: float
    ) -> None:
        few = subset(data, NUM_SAMPLES)
        self.student, self.data, self.logits = student, data, logits
        pairs = {name: (student.get_submodule(name), teacher.get_submodule(name)) for name in blocks}
        replaced = {
            name: own for name, (own, block) in pairs.items() if type(own).__name__ != type(block).__name__
        }
        identities = {name for name, own in replaced.items() if not any(True for _ in own.parameters())}
        self.replaced, self.has_maps = tuple(replaced), len(replaced) > len(identities)
        self.last = blocks[-1:]
        self.blocks = (*(name for name in blocks[:-1] if name not in identities), *self.last)
        self.held_out = few.held_out()
        self.fitting = [batch for batch in few.batches if not batch.held_out and batch.size > 1]
        with torch.no_grad():
            self.teacher_outputs = [self.outputs(teacher, batch, self.last) for batch in self.held_out]
        self.norms = [module for module in student.modules() if foldable(module)]
        self.least, self.best_state = math.inf, state(student)

    @torch.no_grad()
    def best_loss(self) -> float:
        """The lower loss of the student as it is and with BatchNorm statistics estimated anew."""
        loss = self.loss()
        if self.norms and self.fitting:
            states = [copy.deepcopy(norm.state_dict()) for norm in self.norms]
            calls = [partial(self.data.run, batch=batch) for batch in self.fitting]
            estimate_statistics_(self.student, calls)
            loss = min(loss, self.loss())
            for norm, values in zip(self.norms, states, strict=True):
                norm.load_state_dict(values)
        return loss

    def loss(self) -> float:
        outputs = [self.outputs(self.student, batch, self.last) for batch in self.held_out]
        triples = list(zip(outputs, self.teacher_outputs, self.held_out, strict=True))
        loss = sum(float(loss_of(own, target, self.logits)) * batch.size for own, target, batch in triples)
        loss = loss / sum(batch.size for batch in self.held_out) if math.isfinite(loss) else math.inf
        if loss < self.least:
            self.least, self.best_state = loss, state(self.student)
        return loss

    def outputs(self, model: nn.Module, batch: Batch, blocks: Sequence[str]) -> Outputs:
        """The outputs of these blocks, and the logits; without padding."""
        features: list[Tensor] = []

        def record(module: nn.Module, args: Any, output: Any) -> None:
            features.append(unpadded(first(output), batch.tokens))

        with ExitStack() as hooks:
            for name in blocks:
                hooks.enter_context(model.get_submodule(name).register_forward_hook(record))
            logits = main_output(self.data.run(model, batch))
        return features, unpadded(logits, batch.tokens)


class Trainer:
    """Runs training steps; on a GPU they are replayed from a CUDA graph if they can be captured."""

    def __init__(
        self, evaluator: Evaluator, teacher: nn.Module, classifier: str, train_norms: bool, sgd: bool
    ) -> None:
        self.evaluator, self.teacher = evaluator, teacher
        self.norms = evaluator.norms if train_norms else []
        self.blocks = evaluator.blocks if train_norms else evaluator.last
        student = evaluator.student
        frozen = {id(p) for p in student.get_submodule(classifier).parameters()} if classifier else set()
        self.parameters = [p for p in student.parameters() if id(p) not in frozen and p.is_floating_point()]
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
        self.buffers: Batch | None = None  # the inputs that the captured step reads
        self.launch: Callable[[], None] | None = None

    def restart(self) -> None:
        """Reset the optimizer's state."""
        for tensors in self.optimizer.state.values():
            for value in tensors.values():
                value.zero_()

    def capture(self, batch: Batch) -> None:
        """Capture a step on a GPU, for batches without padding; its warm-up steps have a learning rate of 0."""
        if not self.cuda:
            return
        inputs = tree_map_only(Tensor, Tensor.clone, to_device(batch.inputs, self.device))
        self.buffers = Batch(inputs, False, batch.size)
        if self.buffers.tokens is not None:  # cached here, since a capture can't compute it
            return
        self._set_rate(0.0)
        try:
            pool, body = torch.cuda.graph_pool_handle(), partial(self._run, self.buffers)
            self.launch, _ = capture(type(self.evaluator.student).__name__, body, self.device, pool)
        except ReplearnError:
            self.launch = None  # not every model can be captured

    def step(self, batch: Batch, rate: float) -> None:
        self._set_rate(rate)
        fits = self.buffers is not None and batch.tokens is None and copy_into(batch.inputs, self.buffers.inputs)
        if self.launch is not None and fits:
            self.launch()
        else:
            self._run(batch)

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if self.cuda:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _run(self, batch: Batch) -> None:
        for norm in self.norms:
            norm.training = True
        with torch.no_grad():
            target = self.evaluator.outputs(self.teacher, batch, self.blocks)
        own = self.evaluator.outputs(self.evaluator.student, batch, self.blocks)
        loss = loss_of(own, target, self.evaluator.logits)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        for norm in self.norms:
            norm.training = False


def loss_of(own: Outputs, target: Outputs, logits: float) -> Tensor:
    *others, last = (relative_error(a.float(), b.float()) for a, b in zip(own[0], target[0], strict=True))
    loss = last + FEATURE_WEIGHT * sum(others)
    return loss + logits * kd(own[1], target[1]) if logits else loss


def relative_error(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) / target.var().clamp_min(1e-12)


@contextmanager
def eval_and_grad(student: nn.Module) -> Iterator[None]:
    """Inside, the student is in eval mode, as the teacher is, and all parameters require gradients."""
    student.eval()
    flags = {p: p.requires_grad for p in student.parameters() if p.is_floating_point()}
    try:
        for parameter in flags:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter, flag in flags.items():
            parameter.requires_grad_(flag)


def state(model: nn.Module) -> dict[str, Any]:
    return copy.deepcopy(model.state_dict())


def mixed(x: Tensor) -> Tensor:
    """Mixup of half of the batch's images; the teacher gives the targets."""
    share = torch.rand(len(x), *[1] * (x.dim() - 1), device=x.device, dtype=x.dtype)
    share[: len(x) // 2] = 1
    return x * share + x.flip(0) * (1 - share)


def kd(logits: Tensor, target: Tensor, temperature: float = 2.0) -> Tensor:
    """The mean KL divergence at a temperature over rows; the relative squared error for a single output."""
    dim = 1 if target.dim() == 4 else -1
    if target.shape[dim] < 2:
        return relative_error(logits, target)
    one, two = (t.float().div(temperature).log_softmax(dim) for t in (logits, target))
    rows = target.numel() / target.shape[dim]
    return F.kl_div(one, two, log_target=True, reduction="sum") * temperature**2 / rows
