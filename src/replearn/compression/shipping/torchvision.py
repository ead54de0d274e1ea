"""torchvision's ResNets and vision transformers with fewer blocks: their classes, with layers= or num_layers=."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from .build import Build
from .lists import Shortened
from .timm import of_class


def supports(model: nn.Module) -> bool:
    return type(model).__module__.startswith("torchvision.")


def builds(short: Shortened, arguments: dict[str, Any]) -> Iterator[Build]:
    """The model's class with its settings, for the classes that take a number of blocks."""
    model: Any = short.model
    read = {"ResNet": resnet, "VisionTransformer": vision_transformer}.get(type(model).__name__)
    if read is not None:
        yield of_class(model, {**read(model, short), **arguments})


def resnet(model: Any, short: Shortened) -> dict[str, Any]:
    lengths = {found.name: len(found.kept) for found in short.lists}
    found = {
        "block": type(model.layer1[short.lists[0].kept[0]]),
        "layers": [lengths[f"layer{stage}"] for stage in range(1, 5)],
        "num_classes": model.fc.out_features,
    }
    if model.groups != 1 or model.base_width != 64:
        found |= {"groups": model.groups, "width_per_group": model.base_width}
    return found


def vision_transformer(model: Any, short: Shortened) -> dict[str, Any]:
    names = ("image_size", "patch_size", "hidden_dim", "mlp_dim", "dropout", "attention_dropout", "num_classes")
    found = {name: getattr(model, name) for name in names}
    found["num_layers"] = len(short.lists[0].kept)
    found["num_heads"] = model.encoder.layers[short.lists[0].kept[0]].num_heads
    if model.representation_size is not None:
        found["representation_size"] = model.representation_size
    return found
