"""torchvision ResNet, ResNeXt and WideResNet, also as a detector's or segmenter's backbone."""

from torch import nn

from ..anatomy import Anatomy, resnet_anatomy


def describe(block: nn.Module) -> Anatomy | None:
    return resnet_anatomy(block, "torchvision_resnet", "torchvision.models.resnet", ("relu", "relu"))
