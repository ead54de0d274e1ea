"""The trained model of `replearn compress`, by what the user wrote for MODEL, and what its images look like."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ReplearnError, first_line, library
from ..experiments.training.pretrained import weights_of
from ..experiments.training.trained import Trained, read_full_model
from .subjects import built_by, is_hub_name, named_model, not_fetched

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
WORDS = "a run's folder, hf:FOLDER_OR_NAME, timm:NAME, torchvision:NAME, or FILE.py:FUNCTION"


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained model in eval mode; the side, mean and spread of its images; where it came from."""

    model: nn.Module
    name: str
    size: int | None = None  # unknown for an own model without an example image
    mean: tuple[float, ...] = IMAGENET[0]
    std: tuple[float, ...] = IMAGENET[1]
    folder: Path | None = None  # of a Hugging Face model, with its tokenizer
    run: Trained | None = None


def subject_of(
    name: str, weights: str | None, size: int | None, device: torch.device, root: Path | None
) -> Subject:
    """Read the model; ReplearnError that names the flag for what is missing."""
    folder = Path(name.removeprefix("hf:"))
    hugging_face = name.startswith("hf:") or (folder / "config.json").is_file()
    runs = not hugging_face and (folder / "result.json").is_file()
    if weights is not None and (hugging_face or runs):
        raise ReplearnError(f"--pretrained {weights}: {name} has its weights in its folder; leave the flag out.")
    if runs:
        run = read_full_model(folder, device, root)
        made = Subject(run.model, run.name, run=run)
    elif hugging_face:
        made = of_folder(folder, size)
    elif ".py:" in name:
        model, example = built_by("MODEL", name)
        if weights is not None:
            fill_(model, weights)
        side = int(example.shape[-1]) if isinstance(example, torch.Tensor) and example.dim() == 4 else None
        made = Subject(model, name, size or side)
    elif folder.is_dir():
        raise ReplearnError(
            f"MODEL {name}: the folder has neither a result.json nor a config.json. Write {WORDS}."
        )
    else:
        made = named(name, weights, size)
    made.model.eval().to(device)
    return made


def named(name: str, weights: str | None, size: int | None) -> Subject:
    """A model of timm, torchvision or this package, with the weights of a file or those that are published."""
    model, side = named_model(name, weights, size)
    if weights is None:
        model = published(name)
    else:
        fill_(model, weights)
    about = getattr(model, "pretrained_cfg", None) or {}
    if size is None and name.startswith("timm:"):
        side = int(about.get("input_size", (3, side, side))[-1])
    return Subject(model, name, side, tuple(about.get("mean", IMAGENET[0])), tuple(about.get("std", IMAGENET[1])))


def published(name: str) -> nn.Module:
    """timm's or torchvision's model with its published weights, from the hub or its cache."""
    kind, _, rest = name.partition(":")
    try:
        if kind == "timm":
            return library("timm", "vision").create_model(rest, pretrained=True)
        if kind == "torchvision":
            return library("torchvision.models", "vision").get_model(rest, weights="DEFAULT")
    except (OSError, RuntimeError, KeyError) as error:
        told = first_line(error)
        raise ReplearnError(
            f"MODEL {name}: its published weights can't be fetched ({told}). Add --pretrained FILE."
        ) from error
    raise ReplearnError(f"--pretrained is missing: {name} alone is untrained. Add --pretrained FILE.")


def fill_(model: nn.Module, weights: str) -> None:
    try:
        model.load_state_dict(weights_of(weights)[1])
    except RuntimeError as error:  # its last line is about a tensor
        told = str(error).splitlines()[-1].strip()
        raise ReplearnError(f"--pretrained {weights} does not fit {type(model).__name__}: {told}") from error


def of_folder(folder: Path, size: int | None) -> Subject:
    """A model as save_pretrained wrote it or as the hub has it, of the class that its config names."""
    local = not is_hub_name(str(folder))
    if local and not (folder / "config.json").is_file():
        raise ReplearnError(f"MODEL hf:{folder}: there is no config.json in that folder.")
    transformers = library("transformers", "hf")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=local)
        names = [getattr(transformers, name, None) for name in config.architectures or ()]
        kind: Any = next((found for found in names if found is not None), transformers.AutoModel)
        model = kind.from_pretrained(folder, local_files_only=local)
    except (OSError, ValueError, RuntimeError) as error:
        if not local:
            raise not_fetched(f"MODEL hf:{folder}", error) from error
        raise ReplearnError(f"MODEL hf:{folder} can't be loaded by transformers: {first_line(error)}") from error
    side = getattr(config, "image_size", None) or 224
    side = size or int(side[0] if isinstance(side, (list, tuple)) else side)
    file = folder / "preprocessor_config.json"
    about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    mean, std = about.get("image_mean") or IMAGENET[0], about.get("image_std") or IMAGENET[1]
    return Subject(model, f"hf:{folder}", side, tuple(mean), tuple(std), folder)
