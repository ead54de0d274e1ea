"""Base class of methods: a change to a model before training, and optionally at each epoch and step."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ....errors import ReplearnError
from ....operators._base.options import Options
from ....operators.removal import Removal
from ....planning.data import Plan
from ....planning.targets import default_operator
from ....surgery.plan_metadata import attached_plan
from ..recipe import Variant


@dataclass(frozen=True)
class Setting:
    """What a method gets: its row, the run's seed and length, and a function that fits a plan's operators."""

    variant: Variant
    seed: int
    calibrate: Callable[[nn.Module, Plan], None] | None = None  # in place of surgery, on the run's training data
    epochs: int = 1


class Method(ABC):
    """A method of training. The folder is their list: a new method is one new file."""

    name: str
    capturable: bool = True  # False if steps take different paths through the model
    leaves_idle: bool = False  # True if a step may leave parameters without a gradient, for DDP
    has_targets: bool = False  # True if blocks are replaced or removed
    changes_model: bool = False  # True if `start_epoch` may change the model

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.plan: Plan | None = None  # set by `prepare` where blocks are replaced

    @abstractmethod
    def prepare(self, model: nn.Module) -> nn.Module:
        """Change the model, in place or not, before the optimizer is made."""

    def start_epoch(self, model: nn.Module, epoch: int, batch: Callable[[], Tensor]) -> bool:
        """Called before each epoch with a source of one training batch; True if the model changed.

        Must depend on (seed, epoch) and the weights alone, so that a resumed run does the same.
        """
        return False

    def start_step(self, model: nn.Module, epoch: int, step: int) -> None:  # noqa: B027 - may stay empty
        """Called before each training step; must depend on (seed, epoch, step) alone."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint in the middle of an epoch must remember, as JSON can hold it."""
        return {}

    def load_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:  # noqa: B027 - may stay empty
        """Put `state` back before the model's weights are loaded."""

    def finish(self, model: nn.Module) -> nn.Module:
        """Remove what only training needs; the outputs in eval mode stay the same."""
        return model


def carried_plan(model: nn.Module, variant: Variant) -> Plan | None:
    """The plan attached to a pretrained model, or None for a whole model.

    Raises ReplearnError if its method, placement or operator is not that of the row.
    """
    found = attached_plan(model)
    if found is None:
        return None
    placed = re.search(r"interval=\d+, first=\d+(?: or \d+)?(?!.*by similarity)", found.placement)
    there = in_words(placed[0] if placed else found.placement, {target.operator for target in found.targets})
    operators = {variant.operator or default_operator(target.anatomy) for target in found.targets}
    method = variant.method.partition("+")[0]
    asked = in_words(
        f"interval={variant.interval}, first={variant.begin}", {Removal()} if method == "removal" else operators
    )
    if method == "e2e":
        asked = "whole models"
    if there != asked:
        raise ReplearnError(
            f"The row {variant.label} ({variant.method}) can't start from these weights: it asks for {asked}, "
            f"and they were trained with {there}. Write {{method}} in pretrained, so that each row starts from "
            "weights of its own, as runs/t2_resnet50/imagenet/{method}/seed-0/model.safetensors, and label the "
            "row as the one it was trained by."
        )
    return found


def in_words(placement: str, operators: set[Options]) -> str:
    return f"{placement}, {', '.join(sorted({operator.label() for operator in operators}))}"
