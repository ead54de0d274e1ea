"""The plan as a strip of blocks (kept, replaced, skipped), and the size of the model that it deploys to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...blocks.stacks import find_stacks
from ...deployment.deploy import deploy
from ...errors import ReplearnError
from ...planning.data import Plan
from ...surgery.replace import replace_
from ..training.architectures import is_language_model, language_model
from ..training.recipe import recipe_from_dict
from ..training.results import Result
from ..training.trained import fresh_model
from .chart import WIDTH, legend, shortened
from .scene import Box, Drawing, Mark, Text

NAME_WIDTH, ROW, GAP = 84.0, 26.0, 2.0
BROKEN = (ReplearnError, NotImplementedError, RuntimeError, ImportError, KeyError, TypeError, ValueError)


class NoDraws(TorchFunctionMode):
    """Leaves out random starting values: on the meta device they load the compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "erfinv_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def on_meta(recipe_text: str, data: str, parameters: int) -> nn.Module:
    """The recipe's model without weights; a language model has as many words as `parameters` say."""
    recipe = recipe_from_dict(json.loads(recipe_text))
    with torch.device("meta"), NoDraws():
        if not is_language_model(recipe.model):
            return fresh_model(recipe, data)[0]
        length = recipe.text.sequence_length
        one, two = (language_model(recipe.model, num_words=count, max_length=length) for count in (1, 2))
        words = 1 + (parameters - size(one)) // (size(two) - size(one))
        return language_model(recipe.model, num_words=words, max_length=length)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@lru_cache(maxsize=64)
def blocks_of(recipe_text: str, data: str) -> Mapping[str, Mapping[str, int]]:
    """The parameters of every block of a model by stack and name; none where the model can't be built here."""
    with suppress(*BROKEN):
        built = on_meta(recipe_text, data, 0)
        return {
            stack.name: {name: size(built.get_submodule(name)) for name in stack.blocks}
            for stack in find_stacks(built)
        }
    return {}


@lru_cache(maxsize=256)
def deployed_parameters(recipe_text: str, data: str, plan_text: str) -> int | None:
    """Parameters once each operator has its deployed form; None where the model can't be built here."""
    with suppress(*BROKEN):
        plan = Plan.from_json(plan_text)
        model = replace_(on_meta(recipe_text, data, plan.parameters_before), plan)
        return size(deploy(model.eval(), fold="operators"))
    return None


def deployed_share(result: Result) -> float | None:
    """The parameters of a deployed run over those of the model before its plan."""
    if not result.plan:
        return 1.0
    recipe_text, plan_text = (json.dumps(part, sort_keys=True) for part in (result.recipe, result.plan))
    deployed, full = deployed_parameters(recipe_text, result.data, plan_text), result.plan["parameters_before"]
    return deployed / full if deployed and full else None


def strip_figure(result: Result, label: str, name: str) -> Drawing | None:
    """The plan of a run; None where it has none, or its model can't be built here."""
    plan: Any = result.plan
    try:
        targets = {target["name"]: target for target in plan["targets"]}
        skipped = {entry["name"]: entry for entry in plan["skipped"]}
        stacks = blocks_of(json.dumps(result.recipe, sort_keys=True), result.data)
        if not targets.keys() <= {name for blocks in stacks.values() for name in blocks}:
            return None  # the model can't be built here, or its blocks have other names
        side = min(24.0, (WIDTH - NAME_WIDTH - 6) / max(map(len, stacks.values())) - GAP)
        marks: list[Mark] = []
        for row, (stack, blocks) in enumerate(stacks.items()):
            y = 6 + ROW * row
            marks.append(Text(x=2, y=y + 15, text=shortened(stack, 11), role="muted"))
            for index, (block, parameters) in enumerate(blocks.items()):
                role, lines = told(parameters, targets.get(block), skipped.get(block))
                tip = "\n".join([f"{block} (position {index + 1})", *lines])
                x = NAME_WIDTH + index * (side + GAP)
                marks.append(Box(x, y, side, 20, role, tip=tip, focus=role != "kept"))
        kinds = Counter(_operator(target) for target in targets.values())
        gone = ("removal", "removed") if "removal" in kinds else ("repl", "replaced")
        entries = [("kept", "kept"), gone, *([("skipped", "skipped")] if skipped else [])]
        made, height = legend([(*entry, "box") for entry in entries], 2, 6 + ROW * len(stacks))
        operators = ", ".join(f"{count} by {kind}" for kind, count in kinds.items())
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    share = f"{len(targets)} of {plan.get('num_blocks', '?')} blocks replaced"
    about = f"{share} ({plan.get('placement', '')}): {operators}."
    title = f"Plan of {label}"
    return Drawing(name=name, title=title, about=about, width=WIDTH, height=height, marks=(*marks, *made))


def told(parameters: int, target: Any, skipped: Any) -> tuple[str, list[str]]:
    """The role of a block, and what its hint says."""
    if target is None and skipped is None:
        return "kept", [f"kept, {parameters:,} parameters"]
    if target is None:
        return "skipped", [f"kept, though its turn came: {skipped['reason']}"]
    sides: dict[str, list[str]] = {}
    for read in target["reads"]:
        sides.setdefault(read["side"], []).append(read["role"])
    removed = target["operator"]["name"] == "removal"
    return "removal" if removed else "repl", [
        "removed" if removed else f"replaced by {_operator(target)}",
        *(f"reads {', '.join(roles)} from {target[which]}" for which, roles in sides.items()),
        f"{target['parameters_before']:,} parameters before, {target['parameters_after']:,} after",
        *list(target.get("notes", ()))[:3],
    ]


def _operator(target: Mapping[str, Any]) -> str:
    options = target["operator"]
    given = (options.get(key) for key in ("sources", "correction"))
    extra = [str(value) for value in given if value not in (None, "both", "none")]
    return str(options["name"]).replace("_", " ") + (f" ({', '.join(extra)})" if extra else "")
