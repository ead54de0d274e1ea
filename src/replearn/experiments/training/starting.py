"""Start a detector or a segmenter from a trained classifier: the weights, and its plan if blocks are replaced."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ...surgery.backbones import load_backbone_
from .pretrained import read_weights, timm_weights


def start_backbone_(model: nn.Module, source: str) -> str:
    """Fill the backbone from a file, a folder or timm:NAME; what was and wasn't loaded, in words.

    Raises ReplearnError, with the model unchanged, for weights of another backbone.
    """
    if source.startswith("timm:"):
        return str(load_backbone_(model, timm_weights(source.removeprefix("timm:")))).replace(
            "the state dict", source, 1
        )
    path = Path(source)
    file = path / "model.safetensors" if path.is_dir() and (path / "model.safetensors").is_file() else path
    if file.suffix == ".safetensors" and file.is_file():
        return str(load_backbone_(model, file))
    return str(load_backbone_(model, read_weights(path))).replace("the state dict", source, 1)
