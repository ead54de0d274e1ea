"""Models by name, for recipes and the command line."""

from difflib import get_close_matches
from inspect import signature
from typing import Any

from torch import nn

from ...errors import ReplearnError, library
from ...models import CifarResNet, TransformerLM

_NAMES = {
    **{f"resnet{depth}": f"cifar_resnet:{depth}:16" for depth in (20, 32, 56, 110)},
    **{f"resnet{depth}": f"torchvision:resnet{depth}" for depth in (18, 34, 50, 101, 152)},
    "vit_tiny_8": "vit:192:12:3:8",
    "vit_patch4": "vit:192:12:3:4",
    "vit_tiny_16": "vit:192:12:3:16",
    "vit_small_16": "vit:384:12:6:16",
    "vit_base_16": "vit:768:12:12:16",
}
_LANGUAGE = {"transformer_lm_12l_512d": "lm:512:12:8:2048"}


def architecture(name: str, *, num_classes: int = 10, channels: int = 3, size: int = 32) -> nn.Module:
    """Build a model: one of the recipes', `cifar_resnet:DEPTH:WIDTH`, `vit:DIM:DEPTH:HEADS:PATCH`,
    `timm:NAME` or `torchvision:NAME`.

    >>> architecture("cifar_resnet:20:8").fc.out_features
    10
    """
    kind, _, rest = _NAMES.get(name, name).partition(":")
    numbers = rest.split(":")
    try:
        if kind == "cifar_resnet" and len(numbers) == 2:
            depth, width = map(int, numbers)
            return CifarResNet(depth, num_classes, channels, width)
        if kind == "vit" and len(numbers) == 4:
            dim, depth, heads, patch = map(int, numbers)
            if patch < 1 or size % patch:
                raise ReplearnError(
                    f"The model {name!r} can't be built for {size}x{size} images: patches of {patch} pixels do "
                    "not divide them. Use another patch size, or resize the images (augment.DATA.resize)."
                )
            shape = {"embed_dim": dim, "depth": depth, "num_heads": heads, "patch_size": patch, "img_size": size}
            return _timm("vit_tiny_patch16_224", num_classes=num_classes, in_chans=channels, **shape)
        if kind == "timm" and len(numbers) == 1:
            return _timm(rest, num_classes=num_classes, in_chans=channels)
        if kind == "torchvision" and len(numbers) == 1:
            if channels != 3:
                raise ReplearnError(
                    f"The model {name!r} is torchvision's and takes images of 3 channels; these have {channels}. "
                    "Write timm:NAME, which takes any number."
                )
            models = library("torchvision", "vision").models
            takes = signature(models.get_model_builder(rest)).parameters
            none = dict.fromkeys({"weights", "weights_backbone"} & set(takes))  # by default they are downloaded
            return models.get_model(rest, **none, num_classes=num_classes)
    except ReplearnError:
        raise
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        raise ReplearnError(f"The model {name!r} can't be built for {size}x{size} images: {error}.") from error
    near = get_close_matches(name, _NAMES)
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    raise ReplearnError(
        f"There is no model {name!r}.{hint} There are {', '.join(_NAMES)}; or write cifar_resnet:DEPTH:WIDTH, "
        "vit:DIM:DEPTH:HEADS:PATCH, timm:NAME, torchvision:NAME; plan and compress take hf:NAME, too."
    )


def is_language_model(name: str) -> bool:
    return name.startswith("lm:") or name.partition(":")[0] in _LANGUAGE


def language_model(name: str, *, num_words: int, max_length: int = 128) -> nn.Module:
    """Build a language model: one of the recipes', or `lm:DIM:DEPTH:HEADS:MLP`; `:untied` unties its output.

    >>> language_model("lm:16:4:2:32", num_words=50).head.out_features
    50
    """
    base = name.removesuffix(":untied")
    kind, *numbers = _LANGUAGE.get(base, base).split(":")
    if kind != "lm" or len(numbers) != 4 or not all(number.isdecimal() for number in numbers):
        raise ReplearnError(
            f"There is no language model {name!r}. There are {', '.join(_LANGUAGE)}; or write "
            "lm:DIM:DEPTH:HEADS:MLP, with :untied for an output layer of its own."
        )
    dim, depth, heads, hidden = map(int, numbers)
    shape = {"dim": dim, "depth": depth, "num_heads": heads, "hidden": hidden}
    return TransformerLM(num_words, **shape, max_length=max_length, tied=base == name)


def num_heads(name: str) -> int | None:
    """The attention heads that a model's name gives; None where it gives none.

    >>> num_heads("lm:16:4:2:32"), num_heads("vit_tiny_8"), num_heads("resnet32")
    (2, 3, None)
    """
    base = name.removesuffix(":untied")
    kind, *numbers = (_NAMES | _LANGUAGE).get(base, base).split(":")
    return int(numbers[2]) if kind in ("lm", "vit") and len(numbers) == 4 else None


def _timm(name: str, **settings: Any) -> nn.Module:
    return library("timm", "vision").create_model(name, pretrained=False, **settings)
