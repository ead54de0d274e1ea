"""One run: a model, its method, its data and its optimizer, advanced step by step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..errors import ReplearnError
from ..synthesizing import operators_in, synthesized
from .architectures import architecture
from .batches import Batches
from .methods import method_for
from .methods.base import Setting
from .optimizers import make_optimizer, set_rate
from .processes import Processes
from .recipe import Recipe, Variant
from .results import Epoch, now
from .schedules import rate_at
from .seeds import seed_at
from .step import CapturedStep


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Which run: a recipe's variant on a data set with a seed, and the folder of its files."""

    recipe: Recipe
    variant: Variant
    data: str
    seed: int
    out: Path
    data_root: Path | None = None


class Run:
    """A run in progress. `fit` drives it: start_epoch, step, step, ..., end_epoch, and again."""

    def __init__(self, spec: RunSpec, batches: Batches, device: torch.device, processes: Processes) -> None:
        self.spec, self.batches, self.device, self.processes = spec, batches, device, processes
        recipe = spec.recipe
        self.method = method_for(Setting(spec.variant, spec.seed, recipe.epochs))
        torch.manual_seed(seed_at(spec.seed, "weights"))
        model = architecture(
            recipe.model, num_classes=batches.num_classes, channels=batches.channels, size=batches.size
        )
        model = self.method.prepare(model).to(device)
        if recipe.channels_last:
            to_channels_last_(model)
        self._has_operators = next(operators_in(model), None) is not None
        self.flops = count_flops(model, batches.example(device))
        self.parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.bare = model
        self.model = processes.wrap(model, device, self.method.leaves_idle)
        self.notes: list[str] = []
        if recipe.compile and self.method.capturable:
            self.model.compile()
        elif recipe.compile:
            self.note(f"not compiled: {self.method.name} takes another path at every step")
        self.ema: AveragedModel | None = None
        if recipe.ema_decay is not None and self.sharded:
            raise ReplearnError("Averaging (ema_decay) does not work on a sharded model; train it with ddp.")
        if recipe.ema_decay is not None:
            average = get_ema_multi_avg_fn(recipe.ema_decay)
            self.ema = AveragedModel(model, multi_avg_fn=average, use_buffers=True)
        self.optimizer = make_optimizer(self.model, recipe.optimizer, device)
        self.steps_per_epoch = batches.steps(recipe.batch_size)
        self.steps = self.steps_per_epoch * recipe.epochs
        self.sums = torch.zeros(3, device=device)  # loss, correct, images of the epoch so far
        self.epoch, self.step_in_epoch = 0, 0
        self.epochs: list[Epoch] = []
        self.started = now()
        self._captured: CapturedStep | None = None
        self._capture = device.type == "cuda" and processes.world == 1 and recipe.accumulate == 1
        self.seconds = 0.0
        self._step_times: list[float] = []

    # ---- advancing -------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.epoch >= self.spec.recipe.epochs

    def start_epoch(self) -> None:
        """Draw the epoch's data and let the method change the model."""
        self.batches.start_epoch(self.spec.seed, self.epoch, self.step_in_epoch)
        if self.step_in_epoch == 0:
            self.sums.zero_()
            self.seconds = 0.0
            if self.method.start_epoch(self.bare, self.epoch, self.batches.peek):
                self._captured = None
            if self.ema is not None:
                self.method.follow(self.bare, self.ema.module)
        self.model.train()
        self._step_times = []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def step(self) -> None:
        """Take one optimizer step on the next batch."""
        recipe = self.spec.recipe
        done = self.epoch * self.steps_per_epoch + self.step_in_epoch
        set_rate(self.optimizer, recipe.optimizer.lr * self.rate(done))
        torch.manual_seed(seed_at(self.spec.seed, self.epoch, self.step_in_epoch, self.processes.rank))
        self.method.start_step(self.bare, self.epoch, self.step_in_epoch)
        self.batches.advance(self.step_in_epoch)
        if self._capture and self._captured is None and self.batches.fixed and self.method.capturable:
            self._try_capture()
        (self._captured or self._body)()
        if self.ema is not None:
            self.ema.update_parameters(self.bare)
        self.step_in_epoch += 1

    def rate(self, step: int) -> float:
        return rate_at(self.spec.recipe.schedule, step, self.steps, self.steps_per_epoch)

    def _body(self) -> None:
        recipe = self.spec.recipe
        self.optimizer.zero_grad(set_to_none=True)
        images, labels = self.batches.current()
        for x, y in zip(images.chunk(recipe.accumulate), labels.chunk(recipe.accumulate), strict=True):
            if recipe.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            with self.autocast(), self._synthesized():
                logits = self.model(x)
                loss = self.batches.loss(logits, y, recipe.label_smoothing)
            (loss / recipe.accumulate).backward()
            with torch.no_grad():
                self.sums[0] += loss.detach().float() * y.shape[0]
                self.sums[1] += (logits.detach().argmax(1) == y).sum()
                self.sums[2] += y.shape[0]
        if recipe.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm)
        self.optimizer.step()

    def autocast(self) -> torch.autocast:
        # no cache: a captured step must not keep casts from one replay to the next
        low = self.spec.recipe.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=low, cache_enabled=False)

    def _synthesized(self) -> AbstractContextManager[None]:
        """All operators' weights in one launch; compiled and sharded models make each its own."""
        together = self._has_operators and not self.spec.recipe.compile and not self.sharded
        return synthesized(self.bare) if together else nullcontext()

    def _try_capture(self) -> None:
        self._capture = False  # one attempt for a model; a method that changes the model asks again
        try:
            self._captured = CapturedStep(self._body, self.bare, self.optimizer, [self.sums])
            self._capture = True
            self.note("step captured as a CUDA graph")
        except (RuntimeError, ValueError) as error:
            torch.cuda.synchronize()
            self.optimizer.zero_grad(set_to_none=True)
            self.note(f"step not captured, running it eagerly: {str(error).splitlines()[0]}")

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # ---- measuring -------------------------------------------------------------------------

    def end_epoch(self, seconds: float) -> Epoch:
        """Evaluate, record the epoch and check that training is still sane."""
        loss, correct, images = self.processes.total(self.sums.clone()).tolist()
        if not loss / images < float("inf"):  # NaN compares false too
            raise ReplearnError(
                f"{self.title}: the training loss is {loss / images} in epoch {self.epoch + 1}. "
                + (f"The last good state is {self.found}; " if self.found else "")
                + "lower the learning rate or add warm-up."
            )
        self.seconds += seconds
        test_loss, accuracy, top5 = self.evaluate()
        measured = Epoch(
            epoch=self.epoch + 1,
            train_loss=loss / images,
            train_accuracy=100 * correct / images,
            test_loss=test_loss,
            test_accuracy=accuracy,
            test_top5=top5,
            lr=self.spec.recipe.optimizer.lr * self.rate((self.epoch + 1) * self.steps_per_epoch - 1),
            seconds=self.seconds,
            images_per_second=images / max(self.seconds, 1e-9),
            peak_memory=self.peak_memory,
        )
        self.epochs.append(measured)
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        return measured

    @property
    def peak_memory(self) -> int:
        """The most memory that training needed so far in this epoch; 0 where the device can't tell."""
        if self._captured is not None:
            return self._captured.peak_memory
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float, float]:
        """Loss, accuracy and top-5 accuracy on the test set, of the averaged model if there is one."""
        model = self.ema or (self.model if self.processes.parallel == "fsdp" else self.bare)
        model.eval()
        sums = torch.zeros(4, device=self.device)
        for images, labels in self.batches.test(self.processes):
            if self.spec.recipe.channels_last:
                images = images.contiguous(memory_format=torch.channels_last)
            with self.autocast():
                logits = model(images).float()
            real = labels >= 0  # a stream fills up its last batches with images that do not count
            logits, labels = logits[real], labels[real]
            top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            found = [cross_entropy(logits, labels, reduction="sum"), top[:, 0].sum(), top.sum()]
            sums += torch.stack([*(value.float() for value in found), sums.new_tensor(labels.shape[0])])
        self.model.train()
        loss, first, five, images_seen = self.processes.total(sums).tolist()
        return loss / images_seen, 100 * first / images_seen, 100 * five / images_seen

    @property
    def title(self) -> str:
        return f"{self.spec.recipe.name}, {self.spec.variant.label}, {self.spec.data}, seed {self.spec.seed}"

    @property
    def checkpoint(self) -> Path:
        """Where the state is written: a file, or a folder of shards where the model is sharded."""
        return self.spec.out / ("checkpoint" if self.sharded else "checkpoint.safetensors")

    @property
    def found(self) -> Path | None:
        """The state that is there, whichever form it was written in."""
        names = ("checkpoint.safetensors", "checkpoint")
        return next((path for name in names if (path := self.spec.out / name).exists()), None)

    @property
    def sharded(self) -> bool:
        return self.processes.world > 1 and self.processes.parallel == "fsdp"


def to_channels_last_(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def count_flops(model: nn.Module, example: Tensor) -> int:
    """FLOPs of a forward pass on one image."""
    from torch.utils.flop_counter import FlopCounterMode

    mode = model.training
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(example)
    model.train(mode)
    return int(counter.get_total_flops())
