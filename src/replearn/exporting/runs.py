"""A trained model from where it lies: the folder of a run, or a checkpoint and the architecture it fits."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..checkpoint import FORMAT, load
from ..errors import ReplearnError
from ..training.architectures import architecture
from ..training.data import shape_of
from ..training.results import read_result
from ..training.state import read_state

MODEL = "model.safetensors"


def load_run(folder: Path) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """The trained model of a finished run in eval mode, an example of its input, and what the run was."""
    if not (folder / MODEL).is_file():
        raise ReplearnError(
            f"{folder} is no folder of a finished run: it has no {MODEL}. Name one that `replearn train` wrote, "
            "or a checkpoint file with --model."
        )
    result = read_result(folder / "result.json")
    name, (classes, channels, size) = str(result.recipe["model"]), shape_of(result.data)
    size = dict(result.recipe.get("augment", {}).get(result.data) or {}).get("resize") or size
    model = architecture(name, num_classes=classes, channels=channels, size=size)
    about = {"model": name, "method": result.variant["label"], "data": result.data, "epochs": len(result.epochs)}
    return filled(model, folder / MODEL), torch.randn(2, channels, size, size), about


def filled(model: nn.Module, file: Path) -> nn.Module:
    """A fresh model with a file's weights, replaced where the file has a plan; in eval mode."""
    if not file.is_file():
        raise ReplearnError(f"There is no file or folder {file}. Name the folder of a run, or a checkpoint.")
    try:
        with safe_open(file, framework="pt") as opened:
            kind = (opened.metadata() or {}).get("format")
    except (SafetensorError, OSError) as error:
        raise ReplearnError(f"{file} is not a readable safetensors file ({error}).") from error
    if kind == FORMAT:
        return load(model, file).eval()
    tensors, _ = read_state(file)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ReplearnError(
            f"{file} does not fit {type(model).__name__}: {str(error).splitlines()[-1].strip()}"
        ) from error
    return model.eval()


def built_by(place: str) -> tuple[nn.Module, Any]:
    """The model and the example that a function in a file of the user's own returns: FILE.py:FUNCTION."""
    file, _, name = place.rpartition(":")
    try:
        made = run_path(file)[name]()
    except (OSError, KeyError) as error:
        raise ReplearnError(
            f"--model {place}: there is no such file or no function {name!r} in it ({error})."
        ) from error
    if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
        raise ReplearnError(
            f"--model {place}: the function has to return the fresh model and an example of its input, as "
            "`return model, torch.randn(2, 3, 224, 224)`."
        )
    return made
