"""The result file of a run: its settings, hardware and measurements."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median_high
from typing import Any, get_type_hints

import torch

from ...errors import ReplearnError
from ...planning.serialization import decode, encode, parse, read_text
from ...surgery.tensor_file import replacing
from .metrics import Metric
from .recipe import Recipe, Variant
from .tasks import task_named

FORMAT = "replearn-result-1"
LARGEST = 16 * 2**20  # bytes of a file; a result of thousands of epochs has a few
SHARED = "shared its device with other runs"  # a note: then times and memory are not the run's own


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The measurements of one epoch; accuracies in percent, memory in bytes.

    `measures` are those of the task, by names that begin with `train_` or `test_`. In files and logs they are on
    one level with the other fields: `to_dict` and `epoch_from_dict`.
    """

    epoch: int
    measures: Mapping[str, float]
    lr: float
    seconds: float  # training alone, without evaluation
    images_per_second: float  # or tokens, or whatever the task counts
    peak_memory: int  # 0 where the device can't tell

    def to_dict(self) -> dict[str, Any]:
        rest = {name: value for name, value in vars(self).items() if name not in ("epoch", "measures")}
        return {"epoch": self.epoch, **self.measures, **rest}


def epoch_from_dict(data: Any, where: str = "epoch") -> Epoch:
    """An epoch as `to_dict` writes it; a measure may be infinite or not a number."""
    if not isinstance(data, dict):
        raise ReplearnError(f"{where} is an object, not {type(data).__name__}")
    measures = {name: value for name, value in data.items() if name.startswith(("train_", "test_"))}
    rest = {name: value for name, value in data.items() if name not in measures}
    read: Epoch = decode(Epoch, {"measures": {}, **rest}, where)
    for name, value in measures.items():
        if type(value) is not float:
            measures[name] = decode(float, value, f"{where}.{name}")
    return replace(read, measures=measures)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. Report `last`; `best` is selected on the test set."""

    recipe: Mapping[str, Any]
    variant: Mapping[str, Any]
    data: str
    seed: int
    plan: Mapping[str, Any] | None
    parameters: int
    flops: int  # multiply-adds times two, of a forward pass on one image
    step_ms: float  # the mean over the last epoch
    epochs: tuple[Epoch, ...]
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    started: str
    finished: bool
    notes: tuple[str, ...] = ()  # fallbacks and warnings: 'captured', 'not captured: ...'
    command: str = ""
    commit: str = ""  # of the source that trained it; a plus where files were changed
    median_seconds: float = 0.0  # of an epoch, where `epochs` holds only some of them

    @property
    def last(self) -> Epoch:
        return self.epochs[-1]

    @property
    def metric(self) -> Metric:
        """The metric of the run's task."""
        return task_named(str(self.recipe.get("task", "classification"))).metric

    @property
    def score(self) -> float:
        """The last epoch's value of the metric."""
        return self.last.measures[self.metric.key]

    @property
    def best(self) -> Epoch:
        metric = self.metric
        return max(self.epochs, key=lambda epoch: metric.sign * epoch.measures[metric.key])

    @property
    def epoch_seconds(self) -> float:
        """The median time of an epoch; the first one, which warms up, is left out if there are more."""
        times = [epoch.seconds for epoch in self.epochs[1:] or self.epochs]
        return self.median_seconds or (median_high(times) if times else 0.0)

    @property
    def peak_memory(self) -> int:
        return max((epoch.peak_memory for epoch in self.epochs), default=0)

    def to_json(self) -> str:
        epochs = [epoch.to_dict() for epoch in self.epochs]
        return json.dumps({"format": FORMAT, **vars(self), "epochs": epochs}, indent=1)


def result_from_json(text: str, where: str = "this") -> Result:
    """Read a result back, every field by its type; ReplearnError for anything that is not one."""
    try:
        data = parse(text, where, LARGEST)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ReplearnError(f"{where} is not a result file of this version of replearn ({FORMAT}).")
        return decoded(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ReplearnError) and str(error).startswith(where):
            raise
        raise ReplearnError(f"{where} is not a readable result file: {str(error).removesuffix('.')}.") from error


def decoded(data: dict[str, Any]) -> Result:
    for name, kinds in (("epochs", list), ("hardware", dict), ("plan", dict | None)):
        if not isinstance(data.get(name), kinds):
            raise ReplearnError(f"{name} is {'a list' if kinds is list else 'an object'}")
    decode(int, data["hardware"].get("processes", 1), "hardware.processes")
    own = {
        "epochs": tuple(epoch_from_dict(entry, f"epochs[{place}]") for place, entry in enumerate(data["epochs"])),
        "recipe": encode(decode(Recipe, data["recipe"], "recipe")),
        "variant": encode(decode(Variant, data["variant"], "variant")),
        **{name: data.get(name) for name in ("hardware", "plan")},
    }
    task = task_named(own["recipe"]["task"])
    for epoch in own["epochs"]:
        if missing := [metric.key for metric in (task.metric, *task.also) if metric.key not in epoch.measures]:
            raise ReplearnError(f"epoch {epoch.epoch} has no {missing[0]}")
    hints = get_type_hints(Result)
    plain = {name: decode(hints[name], data[name], name) for name in hints if name in data and name not in own}
    costs = [(epoch.seconds, epoch.peak_memory) for epoch in own["epochs"]]
    if min(plain["parameters"], plain["flops"], *(value for each in costs for value in each)) < 0:
        raise ReplearnError("parameters, flops, seconds and peak_memory can't be below 0")
    return Result(**{**data, **plain, **own})


def read_result(path: str | os.PathLike[str]) -> Result:
    return result_from_json(text_of(path), str(path))


def text_of(path: str | os.PathLike[str]) -> str:
    try:
        return read_text(Path(path), LARGEST)
    except (OSError, UnicodeDecodeError, ReplearnError) as error:
        raise ReplearnError(f"Can't read the result file {path}: {str(error).removesuffix('.')}.") from error


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file whole or not at all."""
    try:
        with replacing(Path(path)) as file:
            file.write(text.encode())
    except OSError as error:
        raise ReplearnError(f"Can't write {path}: {error}. What was there before is untouched.") from error


def hardware_of(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {"device": device.type, "cpu": platform.machine(), "cores": os.cpu_count()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {"gpu": properties.name, "gpu_memory": properties.total_memory}
    return about


def versions_of() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("replearn", "torch", "torchvision", "timm", "transformers"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


@cache
def provenance() -> tuple[str, str]:
    """The command line, if it is replearn's, and the commit, if this source is in a git checkout."""
    ours = Path(sys.argv[0]).name in ("replearn", "__main__.py")
    root, words = Path(__file__).parents[4], ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        found = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        found = ""
    return command_line(sys.argv[1:]) if ours else "", found.strip() if (root / ".git").exists() else ""


def command_line(words: Sequence[str]) -> str:
    """The command without the folders of this machine.

    >>> command_line(["compare", "demo", "--seeds", "0,1", "--out", "/data/runs", "--data-root=/data/sets"])
    'replearn compare demo --seeds 0,1'
    """
    kept = ["replearn"]
    rest = iter(words)
    for word in rest:
        flag, joined, _ = word.partition("=")
        if flag not in ("--out", "-o", "--into", "--data-root"):
            kept.append(word)
        elif not joined:
            next(rest, None)
    return shlex.join(kept)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
