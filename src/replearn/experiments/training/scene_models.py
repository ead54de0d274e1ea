"""Detectors and segmenters by name: torchvision's, and DeepLabV3+ of segmentation-models-pytorch."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...errors import ReplearnError, library
from .recipe import Detection

DETECTORS = ("retinanet",)
SEGMENTERS = ("deeplabv3", "deeplabv3plus")
FAMILIES = ("resnet", "resnext", "wide_resnet")  # torchvision's names of backbones begin so


def is_detector(name: str) -> bool:
    return name.partition("_")[0] in DETECTORS


def is_segmenter(name: str) -> bool:
    return name.partition("_")[0] in SEGMENTERS


def detector(name: str, *, num_classes: int, settings: Detection | None = None) -> nn.Module:
    """Build a detector: retinanet_BACKBONE with a ResNet of torchvision's.

    >>> detector("retinanet_resnet34", num_classes=3).head.classification_head.num_classes
    3
    """
    backbone = backbone_of(name, DETECTORS, "detector")
    settings = settings or Detection()
    if not 32 <= settings.min_size <= settings.max_size:
        raise ReplearnError(
            f"detection.min_size={settings.min_size}, detection.max_size={settings.max_size}: write a min_size "
            "from 32 to max_size."
        )
    from .retinanet import retinanet

    return retinanet(backbone, num_classes, settings)


def segmenter(name: str, *, num_classes: int, auxiliary: bool = False) -> nn.Module:
    """Build a segmenter: deeplabv3_BACKBONE (torchvision) or deeplabv3plus_BACKBONE (segmentation-models-pytorch).

    `auxiliary` adds a head at the third stage, which helps in training; deeplabv3plus has none.
    """
    backbone = backbone_of(name, SEGMENTERS, "segmenter")
    plus = name.startswith("deeplabv3plus")
    if auxiliary and plus:
        raise ReplearnError(f"{name} has no auxiliary head: write segmentation.auxiliary=0.")
    try:
        if not plus:
            return _deeplabv3(backbone, num_classes, auxiliary)
        smp = library("segmentation_models_pytorch", "scenes")
        return smp.DeepLabV3Plus(encoder_name=backbone, encoder_weights=None, classes=num_classes)
    except NotImplementedError as error:  # torchvision's BasicBlock knows no dilation
        raise ReplearnError(
            f"{name} can't be built: {error}. Use a backbone of bottlenecks, as deeplabv3_resnet50, or "
            f"deeplabv3plus_{backbone}."
        ) from error
    except KeyError as error:
        raise ReplearnError(f"{name} can't be built: {error.args[0]}") from error


def _deeplabv3(backbone: str, num_classes: int, auxiliary: bool) -> nn.Module:
    """torchvision's DeepLabV3: the last two stages dilated instead of strided."""
    from torchvision.models import get_model
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3
    from torchvision.models.segmentation.fcn import FCNHead

    body = get_model(backbone, weights=None, replace_stride_with_dilation=[False, True, True])
    width = int(body.inplanes)
    layers = {"layer4": "out", **({"layer3": "aux"} if auxiliary else {})}
    head = FCNHead(width // 2, num_classes) if auxiliary else None
    return DeepLabV3(IntermediateLayerGetter(body, layers), DeepLabHead(width, num_classes), head)


def stride_of(name: str) -> int:
    """What the sides of a picture must be multiples of; DeepLabV3 takes any size."""
    return 16 if name.startswith("deeplabv3plus") else 1


def logits_of(made: Tensor | dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """A segmenter's logits, and its auxiliary head's where it has one."""
    return (made, None) if isinstance(made, Tensor) else (made["out"], made.get("aux"))


def backbone_of(name: str, kinds: Sequence[str], what: str) -> str:
    """The backbone that a name ends with."""
    models = library("torchvision", "vision").models
    backbones = [model for model in models.list_models() if model.startswith(FAMILIES)]
    kind, _, backbone = name.partition("_")
    if kind in kinds and backbone in backbones:
        return backbone
    listed = " or ".join(f"{kind}_BACKBONE" for kind in kinds)
    raise ReplearnError(f"There is no {what} {name!r}. Write {listed} with one of {', '.join(backbones)}.")


def on_meta(name: str, num_classes: int = 80) -> nn.Module:
    """A detector or segmenter without weights, to plan on."""
    with torch.device("meta"):
        return (detector if is_detector(name) else segmenter)(name, num_classes=num_classes)
