"""Where a run's epochs go beside its own log: TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import Any

from ...errors import ReplearnError
from ...planning.serialization import encode
from .run import RunSpec

PROJECT = "replearn"


class TensorBoardLogger:
    def __init__(self, module: Any, title: str, spec: RunSpec) -> None:
        self.writer = module.SummaryWriter(str(spec.out / "tensorboard"))

    def epoch(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)

    def end(self) -> None:
        self.writer.close()


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


def module_of(name: str) -> Any:
    """The service's library; ReplearnError where it is unknown or not installed."""
    if name not in LOGGERS:
        raise ReplearnError(f"logger={name!r}: there are {', '.join(LOGGERS)}.")
    try:
        return import_module(name)
    except ImportError as error:
        raise ReplearnError(f"logger={name!r} is not installed: pip install 'replearn[{name}]'.") from error


def loggers_for(name: str | None, title: str, spec: RunSpec) -> list[Any]:
    """TensorBoard where it is installed, and the service of this name."""
    made: list[Any] = [] if name is None else [LOGGERS[name](module_of(name), title, spec)]
    try:
        return [TensorBoardLogger(import_module("torch.utils.tensorboard"), title, spec), *made]
    except ImportError:  # TensorBoard is optional; the JSON lines hold the same numbers
        return made


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
