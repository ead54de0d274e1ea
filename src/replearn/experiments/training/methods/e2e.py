"""End-to-end training: the model as it is. The baseline of every table."""

from torch import nn

from .base import Method, carried_plan


class EndToEnd(Method):
    name = "e2e"

    def prepare(self, model: nn.Module) -> nn.Module:
        carried_plan(model, self.setting.variant)  # refuses one with replaced blocks
        return model
