"""Where a run's epochs go: a file of JSON lines, TensorBoard, and Weights & Biases or MLflow."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from importlib import import_module
from typing import Any

from ...errors import ReplearnError
from ...planning.serialization import encode
from .results import Epoch, write_atomically
from .run import Run

FORMAT = "replearn-log-1"
PROJECT = "replearn"


class JsonLines:
    """A line an epoch; a resumed run goes on in the same file."""

    def __init__(self, run: Run) -> None:
        self.path = run.spec.out / "log.jsonl"
        # the epochs of the state that the run goes on from: a killed run's lines may be torn
        write_atomically(self.path, "".join(map(self.line, run.epochs)))

    @staticmethod
    def line(epoch: Epoch) -> str:
        return json.dumps({"format": FORMAT, **epoch.to_dict()}) + "\n"

    def epoch(self, epoch: Epoch) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(self.line(epoch))

    def end(self) -> None:
        pass


class TensorBoard:
    def __init__(self, module: Any, run: Run) -> None:
        self.writer = module.SummaryWriter(str(run.spec.out / "tensorboard"))

    def epoch(self, epoch: Epoch) -> None:
        for key, value in numbers(epoch).items():
            self.writer.add_scalar(key, value, epoch.epoch)

    def end(self) -> None:
        self.writer.close()


class Wandb:
    """A W&B run; a resumed run goes on in the same one. Environment variables say where, as WANDB_MODE does."""

    def __init__(self, module: Any, run: Run) -> None:
        out = run.spec.out
        name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]
        self.run = module.init(
            project=PROJECT, name=run.title, id=name, resume="allow", reinit="create_new", dir=str(out),
            config=about(run),
        )  # fmt: skip

    def epoch(self, epoch: Epoch) -> None:
        self.run.log(numbers(epoch), step=epoch.epoch)

    def end(self) -> None:
        self.run.finish()


class Mlflow:
    """An MLflow run, in the store that MLFLOW_TRACKING_URI names."""

    def __init__(self, module: Any, run: Run) -> None:
        self.client = module.MlflowClient()
        found = self.client.get_experiment_by_name(PROJECT)
        experiment = self.client.create_experiment(PROJECT) if found is None else found.experiment_id
        self.id = self.client.create_run(experiment, run_name=run.title).info.run_id
        for key, value in about(run).items():
            self.client.log_param(self.id, key, str(value)[:6000])

    def epoch(self, epoch: Epoch) -> None:
        for key, value in numbers(epoch).items():
            self.client.log_metric(self.id, key, value, step=epoch.epoch)

    def end(self) -> None:
        self.client.set_terminated(self.id)


SERVICES: dict[str, Any] = {"wandb": Wandb, "mlflow": Mlflow}


def module_of(service: str) -> Any:
    """The service's library; ReplearnError where it is unknown or not installed."""
    if service not in SERVICES:
        raise ReplearnError(f"logger={service!r}: there are {', '.join(SERVICES)}.")
    try:
        return import_module(service)
    except ImportError as error:
        raise ReplearnError(f"logger={service!r} is not installed: pip install 'replearn[{service}]'.") from error


def logs_of(run: Run, service: str | None) -> list[Any]:
    """The file, TensorBoard where it is installed, and the service of this name."""
    made: list[Any] = [JsonLines(run)]
    with suppress(ImportError):  # TensorBoard is optional; the JSON lines hold the same numbers
        made.append(TensorBoard(import_module("torch.utils.tensorboard"), run))
    return made if service is None else [*made, SERVICES[service](module_of(service), run)]


def numbers(epoch: Epoch) -> dict[str, Any]:
    return {name: value for name, value in epoch.to_dict().items() if name != "epoch"}


def about(run: Run) -> dict[str, Any]:
    """What a service shows of a run: its recipe without the other rows, its method, data and seed."""
    spec = run.spec
    recipe = {key: value for key, value in encode(spec.recipe).items() if key not in ("variants", "paper")}
    own = {"recipe": spec.recipe.name, "method": spec.variant.label, "data": spec.data, "seed": spec.seed}
    return recipe | own
