"""Models by name, for recipes and the command line."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import ReplearnError
from ..models import CifarResNet

_TIMM = {  # name: (timm's name, patch size or None for timm's own)
    "vit_tiny_8": ("vit_tiny_patch16_224", 8),
    "vit_patch4": ("vit_tiny_patch16_224", 4),
    "vit_tiny_16": ("vit_tiny_patch16_224", 16),
    "vit_small_16": ("vit_small_patch16_224", 16),
    "vit_base_16": ("vit_base_patch16_224", 16),
}
_TORCHVISION = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_CIFAR = {"resnet20": 20, "resnet32": 32, "resnet56": 56, "resnet110": 110}


def architecture(name: str, *, num_classes: int = 10, channels: int = 3, size: int = 32) -> nn.Module:
    """Build a model: one of the recipes', `cifar_resnet:DEPTH:WIDTH`, `vit:DIM:DEPTH:HEADS:PATCH`,
    `timm:NAME` or `torchvision:NAME`.

    >>> architecture("cifar_resnet:20:8").fc.out_features
    10
    """
    kind, *numbers = name.split(":")
    try:
        if name in _CIFAR:
            return CifarResNet(_CIFAR[name], num_classes, channels)
        if kind == "cifar_resnet" and len(numbers) == 2:
            return CifarResNet(int(numbers[0]), num_classes, channels, width=int(numbers[1]))
        if kind == "vit" and len(numbers) == 4:
            dim, depth, heads, patch = (int(number) for number in numbers)
            check_patch(name, patch, size)
            shape = {"embed_dim": dim, "depth": depth, "num_heads": heads, "patch_size": patch}
            return _timm(
                "vit_tiny_patch16_224", num_classes=num_classes, in_chans=channels, img_size=size, **shape
            )
        if name in _TIMM:
            base, patch = _TIMM[name]
            check_patch(name, patch, size)
            return _timm(base, num_classes=num_classes, in_chans=channels, img_size=size, patch_size=patch)
        if kind == "timm" and len(numbers) == 1:
            return _timm(numbers[0], num_classes=num_classes, in_chans=channels)
        if name in _TORCHVISION or (kind == "torchvision" and len(numbers) == 1):
            return _torchvision(numbers[0] if numbers else name, num_classes)
    except ReplearnError:
        raise
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise ReplearnError(f"The model {name!r} can't be built for {size}x{size} images: {error}.") from error
    known = ", ".join([*_CIFAR, *_TORCHVISION, *_TIMM])
    raise ReplearnError(
        f"There is no model {name!r}. There are {known}; or write cifar_resnet:DEPTH:WIDTH, "
        "vit:DIM:DEPTH:HEADS:PATCH, timm:NAME, torchvision:NAME."
    )


def check_patch(name: str, patch: int, size: int) -> None:
    if patch < 1 or size % patch:
        raise ReplearnError(
            f"The model {name!r} can't be built for {size}x{size} images: patches of {patch} pixels do not divide "
            "them. Use another patch size, or resize the images (augment.resize)."
        )


def _timm(name: str, **settings: Any) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise ReplearnError("This model needs timm: pip install 'replearn[vision]'.") from error
    model: nn.Module = timm.create_model(name, pretrained=False, **settings)
    return model


def _torchvision(name: str, num_classes: int) -> nn.Module:
    try:
        import torchvision
    except ImportError as error:
        raise ReplearnError("This model needs torchvision: pip install 'replearn[vision]'.") from error
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes)
    return model
