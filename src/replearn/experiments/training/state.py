"""The checkpoint of a run: one safetensors file, written atomically."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ReplearnError
from ...planning.serialization import parse
from ...surgery.tensor_file import PART, read_file, write_file

FORMAT = "replearn-run-2"


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that training changes: tensors by name, and the optimizer's other values.

    `model` is without the wrapper of DDP, so that a run saved by two processes can continue in one.
    """
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
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
) -> None:
    """Load a collected state into a run with the same model and optimizer."""
    model.load_state_dict(under(tensors, "model/"))
    state: dict[str, dict[str, Any]] = {name: dict(entries) for name, entries in values.items()}
    parameters = dict(model.named_parameters())
    for path, tensor in under(tensors, "optimizer/").items():
        name, _, key = path.rpartition("/")
        state.setdefault(name, {})[key] = tensor.to(parameters[name].device, copy=True)
    for name, entries in state.items():
        optimizer.state[parameters[name]] = entries


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def write_state(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a state whole or not at all; the one before it stays until then."""
    try:
        write_file(path, tensors, {"format": FORMAT, "about": json.dumps(about)})
    except OSError as error:
        raise ReplearnError(
            f"Can't write the checkpoint {path}: {error}. The checkpoint before it is untouched; free some "
            "space and resume."
        ) from error


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a state back; ReplearnError for a file that is damaged or not ours."""
    try:
        about, tensors = read_file(path, FORMAT)
        values = parse(about.get("about", ""), "what it says of the run")
        if not isinstance(values, dict):
            raise ReplearnError("what it says of the run is no object.")
        return tensors, values
    except (ReplearnError, OSError) as error:
        raise ReplearnError(f"The checkpoint {path} can't be read: {error} Delete it to start anew.") from error


def remove_leftovers(folder: Path) -> None:
    """Delete partial files of a killed process; only for a folder that no other process writes to."""
    for path in folder.glob(f".*{PART}"):
        path.unlink(missing_ok=True)
