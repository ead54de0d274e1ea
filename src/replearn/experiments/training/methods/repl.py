"""Replacement Learning with every option of the core; without an operator, the paper's for the kind of block.

With `calibrate` the operators start fitted to the blocks of a pretrained model.
"""

from torch import nn

from ....operators._base.options import Options
from ....planning.planner import plan
from ....surgery.replace import replace_
from .base import Method, carried_plan


class ReplacementLearning(Method):
    name = "repl"
    has_targets = True

    def prepare(self, model: nn.Module) -> nn.Module:
        variant = self.setting.variant
        if (carried := carried_plan(model, variant)) is not None:
            self.plan = carried
            return model
        self.plan = plan(model, variant.interval, variant.begin, operator=self.operator())
        if variant.calibrate and self.setting.calibrate is not None:
            self.setting.calibrate(model, self.plan)
            return model
        return replace_(model, self.plan)

    def operator(self) -> Options | None:
        return self.setting.variant.operator
