"""The state of a run on disk: one safetensors file, written atomically."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import ReplearnError

FORMAT = "replearn-run-1"


def collect(
    model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that training changes: tensors by name, and the optimizer's plain values.

    `model` is the model itself, not what it is wrapped in, so a run saved by two processes goes on in one.
    """
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    if ema is not None:
        tensors |= {f"ema/{name}": tensor for name, tensor in ema.state_dict().items()}
    values: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{name}/{key}"] = value
            else:
                values.setdefault(name, {})[key] = value
    return tensors, values


def restore(
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Mapping[str, Any]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: nn.Module | None,
) -> None:
    """Put a collected state back into a run that was built alike."""
    model.load_state_dict(under(tensors, "model/"))
    if ema is not None:
        ema.load_state_dict(under(tensors, "ema/"))
    state: dict[str, dict[str, Any]] = {name: dict(entries) for name, entries in values.items()}
    for path, tensor in under(tensors, "optimizer/").items():
        name, _, key = path.rpartition("/")
        state.setdefault(name, {})[key] = tensor
    for name, parameter in model.named_parameters():
        if name in state:
            optimizer.state[parameter] = {
                key: on_device_of(value, parameter, key) if isinstance(value, Tensor) else value
                for key, value in state[name].items()
            }


def on_device_of(value: Tensor, parameter: Tensor, key: str) -> Tensor:
    """A state tensor where the optimizer wants it; only a GPU's captured step counts steps on the device."""
    if key == "step" and parameter.device.type == "cpu":
        return value.clone()
    return value.to(parameter.device, copy=True)


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def write_state(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a state whole or not at all; the one before it stays until then."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    unshared = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(unshared, temporary, metadata={"format": FORMAT, "about": json.dumps(about)})
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, (OSError, SafetensorError)):
            raise ReplearnError(
                f"Can't write the checkpoint {path}: {error}. The checkpoint before it is untouched; free some "
                "space and resume."
            ) from error
        raise


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a state back; ReplearnError for a file that is damaged or not ours."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                raise ReplearnError(f"{path} is not a run's checkpoint (format {about.get('format')!r}).")
            values: dict[str, Any] = json.loads(about["about"])
            return {name: file.get_tensor(name) for name in file.keys()}, values  # noqa: SIM118
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, ReplearnError):
            raise
        raise ReplearnError(f"The checkpoint {path} can't be read: {error}. Delete it to start anew.") from error
