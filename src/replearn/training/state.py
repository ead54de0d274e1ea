"""The state of a run on disk: one safetensors file, atomic, resumable on any number of processes."""

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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..errors import ReplearnError

FORMAT = "replearn-run-1"
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def collect(
    model: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that training changes: tensors by name, and the optimizer's plain values.

    Names do not depend on how the model is wrapped, so a run saved by two processes goes on in one.
    Call it in every process; the result is whole in the leading one.
    """
    held: Any = get_model_state_dict(model, options=WHOLE)
    tensors: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in held.items()}
    if ema is not None:
        tensors |= {f"ema/{name}": tensor for name, tensor in ema.state_dict().items()}
    held = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    plain: dict[str, Any] = {"state": {}, "param_groups": held.get("param_groups", [])}
    for parameter, entries in held.get("state", {}).items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{parameter}/{key}"] = value
            else:
                plain["state"].setdefault(parameter, {})[key] = value
    plain["param_groups"] = [
        {key: float(value) if isinstance(value, Tensor) else value for key, value in group.items()}
        for group in plain["param_groups"]
    ]
    return tensors, plain


def restore(
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: nn.Module | None,
) -> None:
    """Put a collected state back, whatever the model is wrapped in now."""
    weights: Any = under(tensors, "model/")
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
    if ema is not None:
        ema.load_state_dict(under(tensors, "ema/"))
    state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in plain["state"].items()}
    for name, tensor in under(tensors, "optimizer/").items():
        parameter, _, key = name.rpartition("/")
        state.setdefault(parameter, {})[key] = tensor
    rates = [group["lr"] for group in optimizer.param_groups]
    groups = [dict(group) for group in plain["param_groups"]]
    for group in groups:
        if "betas" in group:
            group["betas"] = tuple(group["betas"])
    held: Any = {"state": state, "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, held, options=StateDictOptions(full_state_dict=True))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate  # a rate that is a tensor must stay the tensor a captured step reads


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
