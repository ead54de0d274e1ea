"""End-to-end training: the model as it is. The baseline of every table."""

from torch import nn

from .base import Method


class EndToEnd(Method):
    name = "e2e"

    def prepare(self, model: nn.Module) -> nn.Module:
        return model
