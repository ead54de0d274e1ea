"""Save and load: one safetensors file with the weights, the plan and a checksum of both."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
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

from .errors import ReplearnError
from .plans import Plan
from .surgery import plan_of, replace_, restored_on_error
from .whole import refuse_wrapped

FORMAT = "replearn-checkpoint-1"
PathLike = str | os.PathLike[str]


def save(model: nn.Module, path: PathLike) -> None:
    """Write a replaced model's weights and its plan to one safetensors file, atomically.

    The file appears whole or not at all; an existing one is replaced only once the new one is on
    the disk. Tied weights are stored once.
    """
    plan = plan_of(model)
    path = Path(path)
    if not path.parent.is_dir():
        raise ReplearnError(f"Can't save to {path}: the folder {path.parent} does not exist.")
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if tensor.is_meta:
            raise ReplearnError(f"Can't save: {name} is on the meta device and has no values.")
        if hasattr(tensor, "device_mesh"):
            raise ReplearnError(
                f"Can't save: {name} is sharded. Gather the state first, with "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict and full_state_dict=True."
            )
    aliases = tied(state)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in state.items() if name not in aliases}
    about = {"format": FORMAT, "plan": plan.to_json(), "aliases": json.dumps(aliases)}
    about["checksum"] = checksum(tensors, about)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=about)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~current_umask())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, (OSError, SafetensorError)):
            raise ReplearnError(f"Can't save to {path}: {error}. What was there before is untouched.") from error
        raise


def load(model: nn.Module, path: PathLike) -> nn.Module:
    """Replace the blocks of a fresh model as the file's plan says, fill in the weights, and return it.

    `model` is the unmodified architecture, on any device and in any dtype. Raises ReplearnError, with the
    model unchanged, for a file that is damaged or not ours, a plan that does not fit, and for missing
    or extra keys. Nothing is ever unpickled.
    """
    refuse_wrapped(model)
    plan, tensors, aliases = read(path)
    with explained(path), restored_on_error(model, plan):
        replace_(model, plan)
        own = model.state_dict()
        complete = {**tensors, **{name: tensors[kept] for name, kept in aliases.items() if kept in tensors}}
        _check_keys(own, complete, path)
        for name, tensor in own.items():
            if tensor.is_meta:
                raise ReplearnError(
                    f"{name} is on the meta device; create the model with values (model.to_empty)."
                )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(complete[name])
    return model


def read(path: PathLike) -> tuple[Plan, dict[str, Tensor], dict[str, str]]:
    """The plan, the tensors and the tied names of a checkpoint, after checking all of it."""
    path = Path(path)
    if not path.is_file():
        raise ReplearnError(f"There is no checkpoint at {path}.")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            if about.get("format") != FORMAT:
                found = about.get("format")
                raise ReplearnError(
                    f"{path} is a safetensors file, but not a replearn checkpoint of this version "
                    f"(format {found!r}, expected {FORMAT!r}). Save it with replearn.save."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        if isinstance(error, ReplearnError):
            raise
        raise ReplearnError(f"{path} is not a readable safetensors file: {error}. It may be cut off.") from error
    if about.get("checksum") != checksum(tensors, about):
        raise ReplearnError(f"{path} is damaged: its contents do not match its checksum. Use another copy.")
    with explained(path):
        plan = Plan.from_json(about.get("plan", ""))
        aliases = json.loads(about.get("aliases", "{}"))
        if not isinstance(aliases, dict) or not all(isinstance(v, str) for v in aliases.values()):
            raise ReplearnError("its list of tied weights is damaged")
    return plan, tensors, aliases


@contextlib.contextmanager
def explained(path: PathLike) -> Any:
    """Say which file it was."""
    try:
        yield
    except ReplearnError as error:
        raise ReplearnError(f"Can't load {path}: {error} The model is unchanged.") from error


def _check_keys(own: Mapping[str, Tensor], found: Mapping[str, Tensor], path: PathLike) -> None:
    missing = sorted(own.keys() - found.keys())
    extra = sorted(found.keys() - own.keys())
    if missing or extra:
        parts = [
            f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
            for what, names in (("missing", missing), ("unexpected", extra))
            if names
        ]
        raise ReplearnError(f"the file's keys are not the model's: {' and '.join(parts)}.")
    for name, tensor in own.items():
        if tensor.shape != found[name].shape:
            raise ReplearnError(
                f"{name} has the shape {tuple(found[name].shape)} in the file and "
                f"{tuple(tensor.shape)} in the model."
            )


def tied(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Names whose tensor is exactly that of an earlier name, mapped to that name."""
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name, tensor in state.items():
        if tensor.numel() == 0:
            continue
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if where in first:
            aliases[name] = first[where]
        else:
            first[where] = name
    return aliases


def checksum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of the tensors, and over the other metadata."""
    digest = hashlib.sha256()
    for key in sorted(about):
        if key != "checksum":
            digest.update(f"{key}={about[key]}\0".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\0".encode())
        digest.update(bytes_of(tensor.contiguous()))
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's bytes, without a copy and without NumPy."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr()))


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
