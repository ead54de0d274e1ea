"""timm ResNets: every variant built of timm.models.resnet's two block classes."""

from torch import nn

from ..anatomy import Anatomy, resnet_anatomy


def describe(block: nn.Module) -> Anatomy | None:
    return resnet_anatomy(block, "timm_resnet", "timm.models.resnet", ("act2", "act3"))
