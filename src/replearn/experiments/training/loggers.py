"""Weights & Biases and MLflow, through their own interfaces: every epoch of a run goes there too."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from ...errors import ReplearnError
from ...planning.serialization import encode
from .fit import Progress
from .results import Epoch
from .run import RunSpec

PROJECT = "replearn"


class Logger(Protocol):
    """One run in a logging service."""

    def epoch(self, values: dict[str, float], step: int) -> None: ...
    def end(self) -> None: ...


class WandbLogger:
    """A W&B run; a resumed run goes on in the same one. Environment variables say where, as WANDB_MODE does."""

    def __init__(self, module: Any, title: str, spec: RunSpec) -> None:
        name = hashlib.sha256(str(spec.out.resolve()).encode()).hexdigest()[:16]
        self.run = module.init(
            project=PROJECT, name=title, id=name, resume="allow", reinit="create_new", dir=str(spec.out),
            config=about(spec),
        )  # fmt: skip

    def epoch(self, values: dict[str, float], step: int) -> None:
        self.run.log(values, step=step)

    def end(self) -> None:
        self.run.finish()


class MlflowLogger:
    """An MLflow run, in the store that MLFLOW_TRACKING_URI names."""

    def __init__(self, module: Any, title: str, spec: RunSpec) -> None:
        self.client = module.MlflowClient()
        found = self.client.get_experiment_by_name(PROJECT)
        experiment = self.client.create_experiment(PROJECT) if found is None else found.experiment_id
        self.id = self.client.create_run(experiment, run_name=title).info.run_id
        for key, value in about(spec).items():
            self.client.log_param(self.id, key, str(value)[:6000])

    def epoch(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self.client.log_metric(self.id, key, value, step=step)

    def end(self) -> None:
        self.client.set_terminated(self.id)


LOGGERS: dict[str, Any] = {"wandb": WandbLogger, "mlflow": MlflowLogger}


class Logged:
    """A `Progress` that also sends every epoch to a logging service."""

    def __init__(self, progress: Progress, name: str, specs: Sequence[RunSpec]) -> None:
        self.progress, self.name, self.specs = progress, name, specs
        self.module = module_of(name)
        self.loggers: list[Logger] = []
        self.step, self.note = progress.step, progress.note

    def begin(self, runs: Sequence[str]) -> None:
        self.progress.begin(runs)
        made = LOGGERS[self.name]
        self.loggers = [made(self.module, title, spec) for title, spec in zip(runs, self.specs, strict=True)]

    def epoch(self, run: int, epoch: Epoch) -> None:
        self.progress.epoch(run, epoch)
        values = {key: value for key, value in epoch.to_dict().items() if isinstance(value, (int, float))}
        self.loggers[run].epoch(values, epoch.epoch)

    def end(self) -> None:
        self.progress.end()
        for logger in self.loggers:
            logger.end()


def logged(progress: Progress, name: str | None, specs: Sequence[RunSpec]) -> Progress:
    """`progress` as it is, or with a logger of that name; ReplearnError where it is not installed."""
    return progress if name is None else Logged(progress, name, specs)


def module_of(name: str) -> Any:
    if name not in LOGGERS:
        raise ReplearnError(f"logger={name!r}: there are {', '.join(LOGGERS)}.")
    try:
        return import_module(name)
    except ImportError as error:
        raise ReplearnError(f"logger={name!r} is not installed: pip install 'replearn[{name}]'.") from error


def about(spec: RunSpec) -> dict[str, Any]:
    """What a service shows of a run: its recipe without the other rows, its method, data and seed."""
    recipe = {key: value for key, value in encode(spec.recipe).items() if key not in ("variants", "paper")}
    return {
        **recipe,
        "recipe": spec.recipe.name,
        "method": spec.variant.label,
        "data": spec.data,
        "seed": spec.seed,
    }
