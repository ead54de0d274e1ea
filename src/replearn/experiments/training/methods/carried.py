"""A model that comes with replaced blocks: its pretrained weights brought a plan of their own."""

from __future__ import annotations

import re

from torch import nn

from ....errors import ReplearnError
from ....operators.removal import Removal
from ....planning.data import Plan
from ....planning.targets import default_operator
from ....surgery.plan_metadata import attached_plan
from ..recipe import Variant

HINT = (
    "Write {method} in pretrained, so that each row starts from weights of its own, as "
    "runs/t2_resnet50/imagenet/{method}/seed-0/model.safetensors, and label the row as the one it was trained by."
)


def carried_plan(model: nn.Module, variant: Variant) -> Plan | None:
    """The plan that the model carries, if it is what the row asks for; None for a whole model.

    Raises ReplearnError where method, placement or operator differ.
    """
    found = attached_plan(model)
    if found is None:
        return None
    nothing = all(isinstance(target.operator, Removal) for target in found.targets)
    kind = "removal" if nothing else "repl"
    if kind != variant.method.partition("+")[0]:
        raise ReplearnError(
            f"The row {variant.label} ({variant.method}) can't start from these weights: "
            f"{len(found.targets)} blocks of them are replaced ({kind}). {HINT}"
        )
    there, asked = in_words(found), wanted(variant, found)
    if there != asked:
        raise ReplearnError(
            f"The row {variant.label} can't start from these weights: it asks for {asked}, and they were trained "
            f"with {there}. {HINT}"
        )
    return found


def in_words(plan: Plan) -> str:
    found = re.search(r"interval=\d+, first=\d+(?!.*by similarity)", plan.placement)
    operators = sorted({target.operator.label() for target in plan.targets})
    return f"{found[0] if found else plan.placement}, {', '.join(operators)}"


def wanted(variant: Variant, found: Plan) -> str:
    """What the row asks for, as `in_words` tells a plan; without an operator, each block's own default."""
    placement = f"interval={variant.interval}, first={variant.first or variant.interval}"
    if variant.method.partition("+")[0] == "removal":
        return f"{placement}, {Removal().label()}"
    if variant.operator is not None:
        return f"{placement}, {variant.operator.label()}"
    defaults = {default_operator(target.anatomy).label() for target in found.targets}
    return f"{placement}, {', '.join(sorted(defaults))}"
