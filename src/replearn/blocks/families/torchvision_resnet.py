"""torchvision ResNet, ResNeXt and WideResNet, also as a detector's or segmenter's backbone."""

from torch import nn

from ..anatomy import Anatomy, anatomy, is_a, shape_change


def describe(block: nn.Module) -> Anatomy | None:
    if is_a(block, "torchvision.models.resnet.BasicBlock"):
        return anatomy(
            "torchvision_resnet",
            "basic",
            transition=shape_change(block, "conv1", "conv2"),
            conv1="conv1",
            conv2="conv2",
            norm="bn2",
            activation="relu",
        )
    if is_a(block, "torchvision.models.resnet.Bottleneck"):
        return anatomy(
            "torchvision_resnet",
            "bottleneck",
            transition=shape_change(block, "conv1", "conv2", "conv3"),
            conv1="conv1",
            conv2="conv2",
            conv3="conv3",
            norm="bn3",
            activation="relu",
        )
    return None
