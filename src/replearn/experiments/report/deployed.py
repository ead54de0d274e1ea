"""A run's plan in words, and the size of the model that it deploys to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...deployment.deploy import deploy
from ...errors import ReplearnError
from ...planning.data import Plan
from ...surgery.replace import replace_
from ..training.architectures import depth_asked_for, is_language_model, language_model
from ..training.recipe import recipe_from_dict
from ..training.results import Result
from ..training.trained import fresh_model

BROKEN = (ReplearnError, NotImplementedError, RuntimeError, ImportError, KeyError, TypeError, ValueError)
DEEPEST = 1_000  # a deeper model is not built: the name comes from a file, and building takes time for every layer


class NoDraws(TorchFunctionMode):
    """Leaves out random starting values: on the meta device they load the compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "erfinv_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def on_meta(recipe_text: str, data: str, parameters: int) -> nn.Module:
    """The recipe's model without weights; a language model has as many words as `parameters` say."""
    recipe = recipe_from_dict(json.loads(recipe_text))
    if depth_asked_for(recipe.model) > DEEPEST or recipe.model.startswith("hf:"):  # a folder outside the report's
        raise ReplearnError(f"A report builds no {recipe.model}.")
    with torch.device("meta"), NoDraws():
        if not is_language_model(recipe.model):
            return fresh_model(recipe, data)[0]
        length = recipe.text.sequence_length
        one, two = (language_model(recipe.model, num_words=count, max_length=length) for count in (1, 2))
        words = 1 + (parameters - size(one)) // (size(two) - size(one))
        return language_model(recipe.model, num_words=words, max_length=length)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@lru_cache(maxsize=256)
def deployed_share_of(recipe_text: str, data: str, plan_text: str) -> float | None:
    """The share of parameters that its deployed form has; None where the model can't be built here."""
    with suppress(*BROKEN):
        plan = Plan.from_json(plan_text)
        model = replace_(on_meta(recipe_text, data, plan.parameters_before), plan)
        return size(deploy(model.eval(), fold="operators")) / plan.parameters_before
    return None


def deployed_share(result: Result) -> float | None:
    """The parameters of a deployed run over those of the model before its plan."""
    if not result.plan:
        return 1.0
    recipe_text, plan_text = (json.dumps(part, sort_keys=True) for part in (result.recipe, result.plan))
    return deployed_share_of(recipe_text, result.data, plan_text)


def plan_in_words(result: Result, label: str) -> str:
    """Which blocks a run's plan replaces, and by what; empty where it has none, or is not of its form."""
    plan: Any = result.plan
    try:
        blocks: dict[str, list[str]] = {}
        for target in plan["targets"]:
            blocks.setdefault(operator_of(target), []).append(target["name"])
        parts = [f"{', '.join(names)} by {operator}" for operator, names in blocks.items()]
        parts += [f"{entry['name']} kept ({entry['reason']})" for entry in plan["skipped"]]
        share = f"{len(plan['targets'])} of {plan['num_blocks']} blocks replaced"
        return f"{label}: {share} ({plan['placement']}): {'; '.join(parts)}."
    except (KeyError, TypeError, ValueError, AttributeError):
        return ""


def operator_of(target: Mapping[str, Any]) -> str:
    options = target["operator"]
    given = (options.get(key) for key in ("sources", "correction"))
    extra = [str(value) for value in given if value not in (None, "both", "none")]
    return str(options["name"]).replace("_", " ") + (f" ({', '.join(extra)})" if extra else "")
