"""The result file of a run: what was trained, on what, and what was measured."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..errors import ReplearnError

FORMAT = "replearn-result-1"
SHARED = "shared its device with other runs"  # a note: then times and memory are not the run's own


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What was measured in one epoch; accuracies in percent, memory in bytes."""

    epoch: int
    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    test_top5: float
    lr: float
    seconds: float  # training alone, without evaluation
    images_per_second: float
    peak_memory: int  # 0 where the device can't tell


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. `last` is the number to report; `best` is kept beside it, never instead of it."""

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

    @property
    def last(self) -> Epoch:
        return self.epochs[-1]

    @property
    def best(self) -> Epoch:
        return max(self.epochs, key=lambda epoch: epoch.test_accuracy)

    @property
    def epoch_seconds(self) -> float:
        """The median time of an epoch; the first one, which warms up, is left out if there are more."""
        times = sorted(epoch.seconds for epoch in self.epochs[1:] or self.epochs)
        return times[len(times) // 2] if times else 0.0

    @property
    def peak_memory(self) -> int:
        return max((epoch.peak_memory for epoch in self.epochs), default=0)

    def to_json(self) -> str:
        data = {"format": FORMAT, **asdict(self)}
        if self.epochs:
            data |= {
                "last": asdict(self.last),
                "best": asdict(self.best),
                "epoch_seconds": self.epoch_seconds,
                "peak_memory": self.peak_memory,
            }
        return json.dumps(data, indent=1)


def result_from_json(text: str, where: str = "this") -> Result:
    """Read a result back; ReplearnError for anything that is not one."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ReplearnError(f"{where} is not a result file of this version of replearn ({FORMAT}).")
        for derived in ("last", "best", "epoch_seconds", "peak_memory"):
            data.pop(derived, None)
        epochs = tuple(Epoch(**entry) for entry in data.pop("epochs"))
        notes = tuple(data.pop("notes", ()))
        return Result(epochs=epochs, notes=notes, **data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ReplearnError):
            raise
        raise ReplearnError(f"{where} is not a readable result file: {error}.") from error


def read_result(path: str | os.PathLike[str]) -> Result:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReplearnError(f"Can't read the result file {path}: {error}.") from error
    return result_from_json(text, str(path))


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file whole or not at all."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ReplearnError(f"Can't write {path}: {error}. What was there before is untouched.") from error
        raise


def hardware_of(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {"device": device.type, "cpu": platform.machine(), "cores": os.cpu_count()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {"gpu": properties.name, "gpu_memory": properties.total_memory}
    return about


def versions_of() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("replearn", "torch", "torchvision", "timm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
