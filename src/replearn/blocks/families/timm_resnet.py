"""timm ResNets: every variant built of timm.models.resnet's two block classes."""

from torch import nn

from ..anatomy import Anatomy, anatomy, is_a, shape_change


def describe(block: nn.Module) -> Anatomy | None:
    if is_a(block, "timm.models.resnet.BasicBlock"):
        return anatomy(
            "timm_resnet",
            "basic",
            transition=shape_change(block, "conv1", "conv2"),
            conv1="conv1",
            conv2="conv2",
            norm="bn2",
            activation="act2",
        )
    if is_a(block, "timm.models.resnet.Bottleneck"):
        return anatomy(
            "timm_resnet",
            "bottleneck",
            transition=shape_change(block, "conv1", "conv2", "conv3"),
            conv1="conv1",
            conv2="conv2",
            conv3="conv3",
            norm="bn3",
            activation="act3",
        )
    return None
