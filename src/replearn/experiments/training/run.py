"""One run: a model, its method, its data and its optimizer, advanced step by step."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ReplearnError, first_line
from ...fitting.calibrate import calibrate_
from ...planning.data import Plan
from .methods import method_for
from .methods.base import Setting
from .optimizers import make_optimizer, rate_at, set_rate
from .processes import Processes
from .recipe import Recipe, Variant, slug
from .results import Epoch, now
from .seeds import seed_at
from .step import CapturedStep, autocast_for, not_compiled, step_body
from .tasks import Task

FITTED = 2048  # samples for fitting operators, if the row has no number
LOW = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Which run: a recipe's variant on a data set with a seed, and the folder of its files."""

    recipe: Recipe
    variant: Variant
    data: str
    seed: int
    out: Path
    data_root: Path | None = None

    def __post_init__(self) -> None:
        if self.variant.calibrate and self.recipe.pretrained is None:  # checked before other rows are trained
            raise ReplearnError(
                f"{self.variant.label}: operators are fitted (calibrate={self.variant.calibrate}) to a trained "
                f"model, and {self.recipe.name} starts from random weights. Give it weights: --pretrained "
                "FILE (pretrained=FILE in a recipe)."
            )

    @property
    def epochs(self) -> int:
        return self.recipe.epochs if self.variant.epochs is None else self.variant.epochs

    @property
    def pretrained(self) -> str | None:
        """The recipe's `pretrained` with the row's name for {method}: each row may have its own weights."""
        source = self.recipe.pretrained
        return None if source is None else source.replace("{method}", slug(self.variant.label))


class Run:
    """A run in progress. `fit` drives it: start_epoch, step, step, ..., end_epoch, and again."""

    def __init__(self, spec: RunSpec, task: Task, device: torch.device, processes: Processes) -> None:
        self.spec, self.task, self.device, self.processes = spec, task, device, processes
        recipe, self.batches = spec.recipe, task.batches
        self.low = LOW.get(recipe.precision)
        self.scaler = torch.amp.GradScaler(device.type) if self.low is torch.float16 else None
        self.own_notes: list[str] = []
        self.method = method_for(Setting(spec.variant, spec.seed, self.calibrate, spec.epochs))
        torch.manual_seed(seed_at(spec.seed, "weights"))
        model = task.build()
        self.bare = self.method.prepare(model).to(device)
        self._set_up()
        self.steps_per_epoch = self.batches.steps
        self.steps = self.steps_per_epoch * spec.epochs
        self.sums = torch.zeros(2 + len(task.counted), device=device)  # loss, ..., samples of the epoch so far
        self.epoch, self.step_in_epoch = 0, 0
        self.epochs: list[Epoch] = []
        self.started = now()
        self._captured: CapturedStep | None = None
        self._warm = False  # whether a step was taken in this process
        self._capture = device.type == "cuda" and processes.world == 1 and recipe.accumulate == 1
        if self._capture and self.scaler is not None:
            self._capture = False
            self.note("step not captured, running it eagerly: float16 decides after each step whether it counts")
        self.seconds = 0.0
        self.step_ms = 0.0  # the mean over the last epoch

    def _set_up(self, state: Mapping[Any, Any] = MappingProxyType({})) -> None:
        """Wrap and compile the model and make its optimizer, with the `state` of parameters that it had before."""
        recipe, model = self.spec.recipe, self.bare
        if recipe.channels_last:
            to_channels_last_(model)
        self.flops = count_flops(model, self.task.example())
        self.parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        self.model = self.processes.wrap(model, self.device, self.method.leaves_idle)
        self._compiled = recipe.compile and self.method.capturable
        if self._compiled:
            self.model.compile()
        elif recipe.compile:
            self.note(f"not compiled: {self.method.name} takes another path at every step")
        self.optimizer = make_optimizer(self.model, recipe.optimizer, self.device)
        self.optimizer.state.update({p: state[p] for p in model.parameters() if p in state})
        self._body = step_body(
            self.model,
            self.optimizer,
            self._losses,
            self.autocast,
            accelerated=recipe.accelerate,
            clip_norm=recipe.clip_norm,
            scaler=self.scaler,
        )

    def rebuild(self) -> None:
        """Continue with a model that the method has changed."""
        self._captured = None
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        if trained != {id(p) for p in self.bare.parameters() if p.requires_grad}:
            self._set_up(self.optimizer.state)
            self._warm = False

    # ---- advancing -------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.epoch >= self.spec.epochs

    def start_epoch(self) -> None:
        """Draw the epoch's data and let the method change the model."""
        self.batches.start_epoch(self.spec.seed, self.epoch, self.step_in_epoch)
        if self.step_in_epoch == 0:
            self.sums.zero_()
            self.seconds = 0.0
            seed = seed_at(self.spec.seed, self.epoch, "batch")
            if self.method.start_epoch(self.bare, self.epoch, lambda: self.batches.calibration(seed, 256)[0]):
                self.rebuild()
        self.model.train()
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
        if not self._warm and self.device.type == "cuda" and self.steps_per_epoch > 1:
            torch.cuda.reset_peak_memory_stats(self.device)  # cuDNN's trials took what they could get
        self._warm = True
        self.step_in_epoch += 1

    def rate(self, step: int) -> float:
        return rate_at(self.spec.recipe.schedule, step, self.steps, self.steps_per_epoch)

    def _losses(self) -> Iterator[Callable[[], Tensor]]:
        """A function for the loss of each part of the current batch."""
        batch, count = self.batches.current(), self.spec.recipe.accumulate
        for part in self.task.parts(batch, count) if count > 1 else (batch,):
            yield partial(self._loss, part)

    def _loss(self, part: Any) -> Tensor:
        loss, sums = self.task.loss(self.model, part)
        with torch.no_grad():
            self.sums += sums
        return loss

    def autocast(self) -> torch.autocast:
        return autocast_for(self.device, low=self.low is not None, dtype=self.low or torch.bfloat16)()

    def _try_capture(self) -> None:
        self._capture = False  # no second attempt for this model
        try:
            self._captured = CapturedStep(self._body, self.bare, self.optimizer, [self.sums])
            self._capture = True
            self.note("step captured as a CUDA graph")
        except (RuntimeError, ValueError) as error:
            torch.cuda.synchronize()
            self.optimizer.zero_grad(set_to_none=True)
            self.note(f"step not captured, running it eagerly: {first_line(error)}")

    def note(self, text: str) -> None:
        if text not in self.own_notes:
            self.own_notes.append(text)

    @property
    def notes(self) -> list[str]:
        """The run's own, then the task's as they are now."""
        return [*self.own_notes, *(note for note in self.task.notes() if note not in self.own_notes)]

    # ---- measuring -------------------------------------------------------------------------

    def end_epoch(self, seconds: float) -> Epoch:
        """Evaluate and record the epoch; ReplearnError if the training loss is not finite."""
        sums = self.processes.total(self.sums.clone()).tolist()
        measures = self.task.train_measures(sums)
        if not measures["train_loss"] < float("inf"):  # NaN compares false too
            raise ReplearnError(
                f"{self.title}: the training loss is {measures['train_loss']} in epoch {self.epoch + 1}. "
                + (f"The last good state is {self.checkpoint}; " if self.checkpoint.exists() else "")
                + "lower the learning rate or add warm-up."
            )
        self.seconds += seconds
        peak = self.peak_memory  # before the evaluation, which is not training
        measured = Epoch(
            epoch=self.epoch + 1,
            measures={**measures, **self.evaluate()},
            lr=self.spec.recipe.optimizer.lr * self.rate((self.epoch + 1) * self.steps_per_epoch - 1),
            seconds=self.seconds,
            images_per_second=sums[-1] / max(self.seconds, 1e-9),
            peak_memory=peak,
        )
        self.epochs.append(measured)
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        return measured

    @property
    def peak_memory(self) -> int:
        """The peak memory of training in this epoch so far; 0 on a CPU."""
        if self._captured is not None:
            return self._captured.peak_memory
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """What the task measures on the test set."""
        with not_compiled(self._compiled):
            measures = self.task.evaluate(self.bare.eval(), self.autocast())
        self.model.train()
        return measures

    def calibrate(self, model: nn.Module, plan: Plan) -> None:
        """Replace the planned blocks by operators fitted to the pretrained model on training samples."""
        spec = self.spec
        begin = time.perf_counter()
        batches = self.batches.calibration(spec.seed, spec.variant.calibrate or FITTED)
        report = calibrate_(model.to(self.device), plan, batches, correction="none")
        errors = ", ".join(f"{fit.name} {fit.error:.3f} (removal {fit.removal_error:.3f})" for fit in report.fits)
        self.note(f"fitted in {time.perf_counter() - begin:.1f} s on {report.num_samples} samples: {errors}")

    @property
    def title(self) -> str:
        return f"{self.spec.recipe.name}, {self.spec.variant.label}, {self.spec.data}, seed {self.spec.seed}"

    @property
    def checkpoint(self) -> Path:
        return self.spec.out / "checkpoint.safetensors"


def to_channels_last_(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def count_flops(model: nn.Module, example: Any) -> int:
    """FLOPs of a forward pass on one sample."""
    from torch.utils.flop_counter import FlopCounterMode

    mode = model.training
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model.eval()(example)
    model.train(mode)
    return int(counter.get_total_flops())
