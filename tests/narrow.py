"""Narrow ResNets under torchvision's roof, so that detectors and segmenters of them train in seconds on a CPU."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchvision.models import get_model, list_models
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet


class Narrow(ResNet):  # type: ignore[misc]
    """An eighth as wide, three blocks a stage."""

    def _make_layer(self, block: Any, planes: int, *rest: Any, **named: Any) -> nn.Sequential:
        made: nn.Sequential = super()._make_layer(block, planes // 8, *rest, **named)
        return made


def resnet_narrow(**settings: Any) -> Narrow:
    """BasicBlocks."""
    return narrow(BasicBlock, **settings)


def resnet_narrow_bottleneck(**settings: Any) -> Narrow:
    return narrow(Bottleneck, **settings)


def narrow(block: Any, weights: None = None, **settings: Any) -> Narrow:
    classes = settings.pop("num_classes", 1000)
    model = Narrow(block, [3, 3, 3, 3], **settings)
    model.fc = nn.Linear(model.inplanes, classes)
    return model


def register() -> None:
    """Let torchvision know them by name."""
    from torchvision.models._api import register_model

    if "resnet_narrow" not in list_models():
        register_model()(resnet_narrow)
        register_model()(resnet_narrow_bottleneck)
    assert get_model("resnet_narrow", weights=None).inplanes == 64
