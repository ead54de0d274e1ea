"""A model that comes with replaced blocks: its pretrained weights brought a plan of their own."""

from __future__ import annotations

from torch import nn

from ....errors import ReplearnError
from ....operators.removal import Removal
from ....planning.data import Plan
from ....surgery.plan_metadata import carried
from ..recipe import Variant


def carried_plan(model: nn.Module, variant: Variant) -> Plan | None:
    """The plan that the model carries, if its blocks are what the row asks for; None for a whole model."""
    found = carried(model)
    if found is None:
        return None
    nothing = all(isinstance(target.operator, Removal) for target in found.targets)
    kind = "removal" if nothing else "repl"
    if kind != variant.method.partition("+")[0]:
        raise ReplearnError(
            f"The row {variant.label} ({variant.method}) can't start from these weights: "
            f"{len(found.targets)} blocks of them are replaced ({kind}). Write {{method}} in pretrained, so that "
            "each row starts from weights of its own, as runs/t2/imagenet/{method}/seed-0/model.safetensors."
        )
    return found
