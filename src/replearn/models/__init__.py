"""Models that the paper uses and no library ships."""

from .cifar_resnet import CifarResNet, resnet32, resnet56, resnet110

__all__ = ["CifarResNet", "resnet32", "resnet56", "resnet110"]
