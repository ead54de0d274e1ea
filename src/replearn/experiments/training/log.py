"""Loggers of a run's epochs: a file of JSON lines, and Weights & Biases, MLflow or TensorBoard."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ReplearnError, library
from ...planning.serialization import encode
from .results import write_atomically
from .run import Run

FORMAT = "replearn-log-1"
PROJECT = "replearn"


@dataclass(frozen=True)
class Log:
    """A logger: `epoch` is called with the values by name and the number of the epoch."""

    epoch: Callable[[Mapping[str, Any], int], object]
    end: Callable[[], object] = lambda: None


def json_lines(run: Run) -> Log:
    """A line an epoch. The file is rewritten each time: a killed run may leave a cut line or one too many."""

    def write(values: Mapping[str, Any], number: int) -> None:
        lines = [json.dumps({"format": FORMAT, **epoch.to_dict()}) + "\n" for epoch in run.epochs]
        write_atomically(run.spec.out / "log.jsonl", "".join(lines))

    write({}, 0)
    return Log(write)


def wandb(module: Any, run: Run) -> Log:
    """A W&B run, configured by environment variables as WANDB_MODE; a resumed run continues the same one."""
    out = run.spec.out
    name = hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16]
    made = module.init(
        project=PROJECT, name=run.title, id=name, resume="allow", reinit="create_new", dir=str(out),
        config=about(run),
    )  # fmt: skip
    return Log(lambda values, number: made.log(dict(values), step=number), made.finish)


def mlflow(module: Any, run: Run) -> Log:
    """An MLflow run, in the store that MLFLOW_TRACKING_URI names."""
    client = module.MlflowClient()
    found = client.get_experiment_by_name(PROJECT)
    experiment = client.create_experiment(PROJECT) if found is None else found.experiment_id
    name = client.create_run(experiment, run_name=run.title).info.run_id
    for key, value in about(run).items():
        client.log_param(name, key, str(value)[:6000])

    def add(values: Mapping[str, Any], number: int) -> None:
        for key, value in values.items():
            client.log_metric(name, key, value, step=number)

    return Log(add, lambda: client.set_terminated(name))


def tensorboard(module: Any, run: Run) -> Log:
    """An event file in the run's folder: `tensorboard --logdir runs` shows every run below it."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.spec.out))
    writer.add_text("recipe", json.dumps(about(run)))

    def add(values: Mapping[str, Any], number: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, number)

    return Log(add, writer.close)


SERVICES: dict[str, Callable[[Any, Run], Log]] = {"wandb": wandb, "mlflow": mlflow, "tensorboard": tensorboard}


def module_of(service: str) -> Any:
    """The service's library; ReplearnError where it is unknown or not installed."""
    if service not in SERVICES:
        raise ReplearnError(f"logger={service!r}: there are {', '.join(SERVICES)}.")
    return library(service, service)


def logs_of(run: Run, service: str | None) -> list[Log]:
    """The file, and the service of this name."""
    services = [] if service is None else [SERVICES[service](module_of(service), run)]
    return [json_lines(run), *services]


def about(run: Run) -> dict[str, Any]:
    """The settings of a run for a service: its recipe without the other rows, its method, data and seed."""
    spec = run.spec
    recipe = {key: value for key, value in encode(spec.recipe).items() if key not in ("variants", "paper")}
    own = {"recipe": spec.recipe.name, "method": spec.variant.label, "data": spec.data, "seed": spec.seed}
    return recipe | own
