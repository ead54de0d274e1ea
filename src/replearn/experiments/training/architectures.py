"""Models by name, for recipes and the command line."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

from ...errors import ReplearnError
from ...models import CifarResNet, TransformerLM

_TIMM = {  # name: (timm's name, patch size or None for timm's own)
    "vit_tiny_8": ("vit_tiny_patch16_224", 8),
    "vit_patch4": ("vit_tiny_patch16_224", 4),
    "vit_tiny_16": ("vit_tiny_patch16_224", 16),
    "vit_small_16": ("vit_small_patch16_224", 16),
    "vit_base_16": ("vit_base_patch16_224", 16),
}
_TORCHVISION = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_TRANSFORMER_LM = {"transformer_lm_12l_512d": (512, 12, 8, 2048)}  # width, depth, heads, MLP width
_CIFAR = {"resnet20": 20, "resnet32": 32, "resnet56": 56, "resnet110": 110}


def architecture(name: str, *, num_classes: int = 10, channels: int = 3, size: int = 32) -> nn.Module:
    """Build a model: one of the recipes', `cifar_resnet:DEPTH:WIDTH`, `cifar_bottleneck:DEPTH:WIDTH`,
    `vit:DIM:DEPTH:HEADS:PATCH`, `timm:NAME`, `torchvision:NAME`, or `hf:FOLDER` with the config.json of a
    Hugging Face image classifier.

    >>> architecture("cifar_resnet:20:8").fc.out_features
    10
    """
    kind, *numbers = name.split(":")
    try:
        if name in _CIFAR:
            return CifarResNet(_CIFAR[name], num_classes, channels)
        if kind == "cifar_resnet" and len(numbers) == 2:
            return CifarResNet(int(numbers[0]), num_classes, channels, width=int(numbers[1]))
        if kind == "cifar_bottleneck" and len(numbers) == 2:
            depth, width = (int(number) for number in numbers)
            return CifarResNet(depth, num_classes, channels, width, bottleneck=True)
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
            models = library("torchvision", "vision").models
            made: nn.Module = models.get_model(
                numbers[0] if numbers else name, weights=None, num_classes=num_classes
            )
            return made
        if kind == "hf" and numbers:
            return _hugging_face(name.partition(":")[2], num_classes=num_classes, channels=channels, size=size)
    except ReplearnError:
        raise
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise ReplearnError(f"The model {name!r} can't be built for {size}x{size} images: {error}.") from error
    known = ", ".join([*_CIFAR, *_TORCHVISION, *_TIMM])
    raise ReplearnError(
        f"There is no model {name!r}. There are {known}; or write cifar_resnet:DEPTH:WIDTH, "
        "cifar_bottleneck:DEPTH:WIDTH, vit:DIM:DEPTH:HEADS:PATCH, timm:NAME, torchvision:NAME, hf:FOLDER."
    )


def is_language_model(name: str) -> bool:
    return name.startswith("lm:") or name.partition(":")[0] in _TRANSFORMER_LM


def language_model(name: str, *, num_words: int, max_length: int = 128) -> nn.Module:
    """Build a language model: one of the recipes', or `lm:DIM:DEPTH:HEADS:MLP`; `:untied` unties its output.

    >>> language_model("lm:16:4:2:32", num_words=50).head.out_features
    50
    """
    base, _, rest = name.partition(":untied")
    kind, *numbers = base.split(":")
    try:
        if not rest and (base in _TRANSFORMER_LM or (kind == "lm" and len(numbers) == 4)):
            dim, depth, heads, hidden = _TRANSFORMER_LM.get(base) or (int(number) for number in numbers)
            shape = {"dim": dim, "depth": depth, "num_heads": heads, "hidden": hidden}
            return TransformerLM(num_words, **shape, max_length=max_length, tied=base == name)
    except ValueError as error:
        if isinstance(error, ReplearnError):
            raise
        raise ReplearnError(f"The language model {name!r} can't be built: {error}.") from error
    raise ReplearnError(
        f"There is no language model {name!r}. There are {', '.join(_TRANSFORMER_LM)}; or write "
        "lm:DIM:DEPTH:HEADS:MLP, with :untied for an output layer of its own."
    )


def num_heads(name: str) -> int | None:
    """The attention heads that a model's name gives; None where it gives none.

    >>> num_heads("lm:16:4:2:32"), num_heads("vit_tiny_8")
    (2, None)
    """
    if name.removesuffix(":untied") in _TRANSFORMER_LM:
        return _TRANSFORMER_LM[name.removesuffix(":untied")][2]
    return _number(name, {"vit": 2, "lm": 2})


def depth_asked_for(name: str) -> int:
    """The depth that a model's name gives as a number, which may be any; 0 where it gives none.

    >>> depth_asked_for("cifar_resnet:26:8"), depth_asked_for("vit:16:4:2:8"), depth_asked_for("vit_tiny_8")
    (26, 4, 0)
    """
    return _number(name, {"cifar_resnet": 0, "cifar_bottleneck": 0, "vit": 1, "lm": 1}) or 0


def _number(name: str, places: Mapping[str, int]) -> int | None:
    """One of the numbers of a name with its kind's full count of them, by the place it has there."""
    kind, *numbers = name.removesuffix(":untied").split(":")
    whole = kind in places and len(numbers) == (2 if kind.startswith("cifar") else 4)
    return int(numbers[places[kind]]) if whole else None


def check_patch(name: str, patch: int, size: int) -> None:
    if patch < 1 or size % patch:
        raise ReplearnError(
            f"The model {name!r} can't be built for {size}x{size} images: patches of {patch} pixels do not divide "
            "them. Use another patch size, or resize the images (augment.DATA.resize)."
        )


def library(name: str, extra: str) -> Any:
    """An optional library; ReplearnError that names the extra to install."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ReplearnError(f"This model needs {name}: pip install 'replearn[{extra}]'.") from error


def _timm(name: str, **settings: Any) -> nn.Module:
    model: nn.Module = library("timm", "vision").create_model(name, pretrained=False, **settings)
    return model


def _hugging_face(folder: str, *, num_classes: int, channels: int, size: int) -> nn.Module:
    transformers = library("transformers", "hf")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ReplearnError(
            f"hf:{folder}: there is no config.json of a Hugging Face model ({str(error).splitlines()[0]})."
        ) from error
    config.num_labels, config.num_channels, config.image_size = num_classes, channels, size
    model: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
    return model
