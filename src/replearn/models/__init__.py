"""Models that the paper uses and no library ships."""

from .cifar_resnet import CifarResNet, resnet32, resnet56, resnet110
from .transformer_lm import TransformerLM

__all__ = ["CifarResNet", "TransformerLM", "resnet32", "resnet56", "resnet110"]
