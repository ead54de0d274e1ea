"""Plan metadata: a replaced model has its plan as an attribute, and a Hugging Face model in its config too."""

import copy
import json
from collections.abc import Callable
from typing import Any

from torch import nn

from ..planning.data import Plan

PLAN = "_replearn_plan"  # the attribute of a replaced model, as text
CONFIG = "replearn_plan"  # the key in its Hugging Face config, which save_pretrained writes into config.json


def attach_plan_(model: nn.Module, plan: Plan) -> None:
    """Attach a plan to a model and, if it has one, to its Hugging Face config."""
    # as text: timm's reparameterize_model leaves it on a plain model, whose pickle must not need this package
    setattr(model, PLAN, plan.to_json())
    _with_config(model, lambda config: setattr(config, CONFIG, json.loads(plan.to_json())))


def attached_plan(model: nn.Module) -> Plan | None:
    """The plan that is attached to a model, or None."""
    found = getattr(model, PLAN, None)
    return None if found is None else Plan.from_json(found)


def detach_plan_(model: nn.Module) -> None:
    """Remove an attached plan."""
    if hasattr(model, PLAN):
        delattr(model, PLAN)
    if hasattr(written_config(model), CONFIG):
        _with_config(model, lambda config: delattr(config, CONFIG))


def written_config(model: nn.Module) -> Any:
    """The config that a Hugging Face model writes next to its weights, or None."""
    config = getattr(model, "config", None)
    return config if hasattr(model, "save_pretrained") and hasattr(config, "to_json_string") else None


def _with_config(model: nn.Module, change: Callable[[Any], None]) -> None:
    """Change a copy of the config, and put the copy in place of the config everywhere in the model."""
    if (old := written_config(model)) is None:
        return
    new = copy.deepcopy(old)  # a config may be shared with other models
    change(new)
    for module in model.modules():
        for name, value in vars(module).items():
            if value is old:
                vars(module)[name] = new
