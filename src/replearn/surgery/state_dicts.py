"""Checks of state dicts: can they be stored, do they match, can one be copied onto the other."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ReplearnError
from .tensor_file import CODES


def check_storable(state: Mapping[str, Any]) -> None:
    """Raise for anything that a file of plain tensors can't hold."""
    for name, tensor in state.items():
        if hasattr(tensor, "device_mesh"):
            raise ReplearnError(
                f"{name} is sharded. Gather the state on every process, with get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)) from torch.distributed.checkpoint.state_dict; "
                "then call replearn.save(model, path, state=that) on one of them."
            )
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or name.endswith("_extra_state"):
            raise ReplearnError(
                f"{name} is a {type(tensor).__name__}, and a checkpoint holds the model's plain tensors alone. "
                "Keep it as a buffer of the model, or save it in a file of its own."
            )
        if tensor.is_meta:
            raise ReplearnError(f"{name} is on the meta device and has no values. Give it some first.")
        if tensor.layout is not torch.strided or tensor.dtype not in CODES:
            raise ReplearnError(
                f"{name} is a {tensor.layout} tensor of {tensor.dtype}, which safetensors can't hold. Convert it "
                "to a dense tensor of an ordinary dtype first."
            )


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict with names as without torch.compile's wrappers."""
    paths = ((name.split("."), tensor) for name, tensor in state.items())
    return {".".join(part for part in path if part != "_orig_mod"): tensor for path, tensor in paths}


def check_names(own: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """Raise unless both have the same names and shapes."""
    sides = (("missing", own.keys() - found.keys()), ("unexpected", found.keys() - own.keys()))
    parts = [
        f"{len(names)} {what} ({', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in sides
        if names
    ]
    if parts:
        raise ReplearnError(
            f"The keys of {where} are not the model's: {' and '.join(parts)}. Use the architecture it was saved "
            "from."
        )
    for name, tensor in own.items():
        if tensor.shape != found[name].shape:
            raise ReplearnError(
                f"{name} has the shape {tuple(found[name].shape)} in {where} and {tuple(tensor.shape)} in the "
                "model. Use the architecture it was saved from."
            )


def check_copyable(model: nn.Module, own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise unless every tensor can be copied onto the model's without changing its values."""
    live = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    for name, tensor in own.items():
        if tensor.is_meta:
            raise ReplearnError(
                f"{name} is on the meta device. Give the model memory first: model.to_empty(device='cpu')."
            )
        if kind_of(tensor) != kind_of(found[name]):
            raise ReplearnError(
                f"{name} is {found[name].dtype} in the file and {tensor.dtype} in the model, and only floating "
                "dtypes are converted into each other. Use the architecture it was saved from."
            )
        repeats = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.is_inference() or repeats or tensor.untyped_storage()._cdata not in live:
            raise ReplearnError(
                f"{name} can't be written to: it was made under inference_mode, repeats its memory (expand), or "
                "is a copy made by the model's own state_dict. Make it an ordinary parameter or buffer."
            )
    for name, kept in tied(own).items():
        if found[name] is not found[kept] and not torch.equal(found[name], found[kept]):
            raise ReplearnError(
                f"{kept} and {name} are one tensor in the model, and differ in the file. Untie them first, as "
                "they were in the model that was saved."
            )


def check_weights(model: nn.Module, own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise unless these trained weights can be copied onto the model's tensors and are finite."""
    check_storable(found)
    check_copyable(model, own, found)
    for name, tensor in own.items():
        if tensor.is_floating_point():
            copied = found[name].to(tensor.device, tensor.dtype)
            if bool((~copied.isfinite() & tensor.isfinite()).any()):
                raise ReplearnError(
                    f"{name} holds inf or NaN, or is too large for {tensor.dtype}. Use weights of a training "
                    "that did not diverge."
                )


def tied(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Names whose tensor is the same as an earlier name's, mapped to the earlier name."""
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name, tensor in state.items():
        if tensor.numel():
            where = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if (kept := first.setdefault(where, name)) != name:
                aliases[name] = kept
    return aliases


def kind_of(tensor: Tensor) -> object:
    """Floating dtypes are one kind; every other dtype is its own."""
    return "floating" if tensor.dtype.is_floating_point else tensor.dtype
