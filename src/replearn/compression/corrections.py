"""What stands in a block's place: nothing, a linear map, half of the block; and the standard form of each."""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args

import torch
from torch import fx, nn

from ..deployment.merge import merged as with_input
from ..operators._base.layers import norm_as_affine
from ..operators._base.plain import affine, called, graph_of
from ..surgery.hidden_states import record_replacement
from ..surgery.replace import set_submodule
from .calls import Arguments
from .structure import Structure
from .trace import FUNCTIONS, chain

Form = Literal["removal", "channels", "low-rank", "full", "mlp", "attention"]
FORMS: tuple[Form, ...] = get_args(Form)


def correction(
    branch: nn.Module, after: nn.Module | None = None, before: nn.Module | None = None
) -> fx.GraphModule:
    """after(h + branch(h)) for h = before(x): a map on tokens or pixels, or one branch of the block."""
    parts = {"before": before, "branch": branch, "after": after}
    graph = fx.Graph()
    x = graph.placeholder("x")
    h = x if before is None else graph.call_module("before", (x,))
    y = graph.call_function(torch.add, (h, graph.call_module("branch", (h,))))
    graph.output(y if after is None else graph.call_module("after", (y,)))
    made = graph_of({name: part for name, part in parts.items() if part is not None}, graph, "Correction")
    made.meta["correction"] = before is None  # layers alone may compute the same
    return made


def as_called(made: nn.Module, structure: Structure) -> nn.Module:
    """A module of one tensor that takes what the block took, and returns a tuple where the block did."""
    call = structure.call
    return called(made, **call) if any(call.values()) else made


def pass_through(structure: Structure) -> nn.Module:
    """Nothing, in a form that takes what a block took and returns as many values."""
    return as_called(nn.Identity(), structure)


def put_(model: nn.Module, name: str, stand_in: nn.Module) -> None:
    """Put a stand-in in a block's place; hidden states are recorded behind it as they were behind the block."""
    block = model.get_submodule(name)
    set_submodule(model, name, adopt_attributes_(stand_in, block))
    record_replacement(model, block, stand_in)


def adopt_attributes_(stand_in: nn.Module, block: nn.Module) -> nn.Module:
    """Give a stand-in the block's plain attributes, such as its number, which the model's code may read."""
    for name, value in vars(block).items():
        plain = value is None or isinstance(value, (bool, int, float, str))
        if plain and not name.startswith("_") and name != "training" and not hasattr(stand_in, name):
            setattr(stand_in, name, value)
            if isinstance(stand_in, fx.GraphModule):  # whose copies keep only what its meta names
                stand_in.meta.setdefault("_user_preserved_attributes", {})[name] = value
    return stand_in


def channels(width: int, channel: int, dims: int) -> nn.Module:
    """A scale and a shift for every channel."""
    zeros = torch.zeros([width if i == channel else 1 for i in range(1, dims)])
    return affine(zeros, zeros)


def on_last(map: nn.Module, channel: int) -> nn.Module:
    """A map of the last dimension, for features that stand in another."""
    graph = fx.Graph()
    last = graph.call_function(torch.movedim, (graph.placeholder("x"), channel, -1))
    graph.output(graph.call_function(torch.movedim, (graph.call_module("map", (last,)), -1, channel)))
    return graph_of({"map": map}, graph, "OnLast")


def image_map(width: int, kernel: int, rank: int | None) -> nn.Sequential:
    """A convolution, or two thin ones, with BatchNorm behind."""
    if rank is None:
        return nn.Sequential(
            nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(width)
        )
    return nn.Sequential(
        nn.Conv2d(width, rank, kernel, padding=kernel // 2, bias=False),
        nn.Conv2d(rank, width, 1, bias=False),
        nn.BatchNorm2d(width),
    )


def token_map(width: int, rank: int | None) -> nn.Module:
    """A linear layer, or two thin ones."""
    if rank is None:
        return nn.Linear(width, width)
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))


def nothing() -> nn.Module:
    """A branch that adds nothing."""
    graph = fx.Graph()
    graph.output(graph.call_function(torch.zeros_like, (graph.placeholder("x"),)))
    return called(graph_of({}, graph, "Nothing"))


def modules_of(block: nn.Module, way: tuple[str, ...]) -> nn.Sequential:
    """The modules and functions of a chain, one after another."""
    return nn.Sequential(
        *(FUNCTIONS[step[1:]]() if step.startswith("=") else block.get_submodule(step) for step in way)
    )


def after_of(block: nn.Module, structure: Structure) -> nn.Module | None:
    """A copy of what follows the block's last sum, or None where nothing does."""
    if not structure.after:
        return None
    own = copy.deepcopy(modules_of(block, structure.after))
    return own[0] if len(own) == 1 else own


def half_of(
    form: Form, block: nn.Module, structure: Structure, arguments: Arguments
) -> tuple[nn.Module, dict[str, str]] | None:
    """A copy of one half of a block, 'mlp' or 'attention', and where in the block its renamed parts come from.

    None where that fails.
    """
    first, second = structure.sums if structure.kind == "transformer" else (None, None)
    if first is None or second is None or not first.attention:
        return None  # the MLP comes first, or there are no halves
    branch = chain(structure.trace, second.stream, second.branch)
    if not branch:
        return None
    if form == "attention":
        half = without_mlp(block, branch, arguments)
        return None if half is None else (half, {})
    between = chain(structure.trace, first.index, second.stream)
    if between is None or structure.after is None:
        return None  # what follows is unclear
    own = copy.deepcopy(block)
    before = modules_of(own, between) if between else None
    made = correction(modules_of(own, branch), after_of(block, structure), before)
    half = as_called(made, structure).eval()
    (where,) = (f"{path}." if path else "" for path, module in half.named_modules() if module is made)
    paths = {f"{where}branch.{i}": step for i, step in enumerate(branch)}
    return half, paths | {f"{where}before.{i}": step for i, step in enumerate(between)}


def without_mlp(block: nn.Module, branch: tuple[str, ...], arguments: Arguments) -> nn.Module | None:
    """A copy of the block with nothing in the place of its MLP's layers; None where it can't be run so."""
    steps = [step for step in branch if not step.startswith("=")]
    if not steps:
        return None
    own = copy.deepcopy(block)
    for number, step in enumerate(steps):
        set_submodule(own, step, nothing() if number == 0 else nn.Identity())
    try:
        with torch.no_grad():
            arguments.run(own.eval())
    except (AttributeError, TypeError, RuntimeError):  # its code looks into the part that is gone
        return None
    return own


def origin(path: str, paths: dict[str, str]) -> str:
    """The path in the whole block of a layer of a half block."""
    for mine, theirs in paths.items():
        if path == mine or path.startswith(f"{mine}."):
            return theirs + path.removeprefix(mine)
    return path


@torch.no_grad()
def plain_(model: nn.Module) -> nn.Module:
    """Exchange every correction that can be for standard layers with the same outputs; returns the model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, fx.GraphModule) and module.meta.get("correction"):
            made = merged(module)
            if made is not module:
                set_submodule(model, name, adopt_attributes_(made.train(module.training), module))
    return model


def merged(made: nn.Module) -> nn.Module:
    """Standard layers that compute what a correction does, or itself."""
    inner, after = getattr(made, "branch", None), getattr(made, "after", None)
    if inner is None:
        return after or nn.Identity()
    if isinstance(inner, nn.Linear):
        layer = with_input(inner)
    elif isinstance(inner, nn.Sequential) and len(inner) == 2 and isinstance(inner[1], nn.BatchNorm2d):
        scale, shift = norm_as_affine(inner[1], torch.float64)
        conv: Any = copy.deepcopy(inner[0])
        conv.weight.copy_(conv.weight.double() * scale.view(-1, 1, 1, 1))
        conv.bias = nn.Parameter(shift.to(conv.weight))
        layer = with_input(conv)
    else:
        return made
    return layer if after is None else nn.Sequential(layer, after)
