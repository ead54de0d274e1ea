"""Late replacement: the whole model for the first tenth of the epochs, then operators fitted to its blocks.

The operators are fitted in closed form on training samples, and training continues as in Replacement Learning. The
control is operators.Removal(), with which the blocks are removed at that point.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ....planning.data import Plan
from ....planning.planner import plan
from ....surgery.replace import exchange_
from .base import Method


class LateReplacement(Method):
    name = "late"
    has_targets = True
    changes_model = True
    replaced = False

    def prepare(self, model: nn.Module) -> nn.Module:
        variant = self.setting.variant
        self.plan = plan(model, variant.interval, variant.begin, operator=variant.operator)
        return model

    def start_epoch(self, model: nn.Module, epoch: int, batch: Callable[[], Tensor]) -> bool:
        whole = min(math.ceil(self.setting.epochs / 10), self.setting.epochs - 1)
        return epoch >= whole and self._replace(model, self.setting.calibrate or partial(exchange_, start=True))

    def state(self) -> dict[str, Any]:
        return {"replaced": self.replaced}

    def load_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        if state["replaced"]:
            self._replace(model, partial(exchange_, start=False))  # the weights come after

    def _replace(self, model: nn.Module, how: Callable[[nn.Module, Plan], None]) -> bool:
        if self.replaced or self.plan is None:
            return False
        how(model, self.plan)
        self.replaced = True
        return True
