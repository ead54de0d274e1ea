"""Removal: the same targets with nothing in their place. The floor; `Variant.operator` is not read."""

from torch import nn

from ....operators.removal import Removal as Nothing
from ....planning.planner import plan
from ....surgery.replace import replace_
from .base import Method, carried_plan


class Removal(Method):
    name = "removal"
    has_targets = True

    def prepare(self, model: nn.Module) -> nn.Module:
        variant = self.setting.variant
        if (carried := carried_plan(model, variant)) is not None:
            self.plan = carried
            return model
        self.plan = plan(model, variant.interval, variant.begin, operator=Nothing())
        return replace_(model, self.plan)
