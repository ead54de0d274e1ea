"""The forms that replace a block: identity, a linear map or half of the block; merged into standard layers."""

from __future__ import annotations

import copy
from typing import Any, Literal, get_args

import torch
from torch import fx, nn

from ..deployment.merge import merged as add_identity
from ..operators._base.layers import norm_as_affine
from ..operators._base.plain import affine, called, graph_of
from ..surgery.hidden_states import record_replacement
from ..surgery.replace import set_submodule
from .activations import Arguments
from .structure import Structure
from .trace import FUNCTIONS, find_chain

Form = Literal["removal", "channels", "low-rank", "full", "mlp", "attention"]
FORMS: tuple[Form, ...] = get_args(Form)


def correction(
    branch: nn.Module, after: nn.Module | None = None, before: nn.Module | None = None
) -> fx.GraphModule:
    """after(h + branch(h)) for h = before(x); the branch is a linear map, or a branch of the block."""
    parts = {"before": before, "branch": branch, "after": after}
    graph = fx.Graph()
    x = graph.placeholder("x")
    h = x if before is None else graph.call_module("before", (x,))
    y = graph.call_function(torch.add, (h, graph.call_module("branch", (h,))))
    graph.output(y if after is None else graph.call_module("after", (y,)))
    module = graph_of({name: part for name, part in parts.items() if part is not None}, graph, "Correction")
    module.meta["correction"] = before is None  # then it may be merged into standard layers
    return module


def with_signature(module: nn.Module, structure: Structure) -> nn.Module:
    """A module of one tensor with the block's signature: its arguments, and a tuple if the block returns one."""
    call = structure.call
    return called(module, **call) if any(call.values()) else module


def identity_for(structure: Structure) -> nn.Module:
    """The identity with the signature of a block."""
    return with_signature(nn.Identity(), structure)


def replace_block_(model: nn.Module, name: str, replacement: nn.Module) -> None:
    """Replace a block of the model; hidden states are recorded after the replacement as after the block."""
    block = model.get_submodule(name)
    set_submodule(model, name, copy_attributes_(replacement, block))
    record_replacement(model, block, replacement)


def copy_attributes_(replacement: nn.Module, block: nn.Module) -> nn.Module:
    """Copy the block's plain attributes, such as its index, which the model's code may read."""
    for name, value in vars(block).items():
        plain = value is None or isinstance(value, (bool, int, float, str))
        if plain and not name.startswith("_") and name != "training" and not hasattr(replacement, name):
            setattr(replacement, name, value)
            if isinstance(replacement, fx.GraphModule):  # its copies keep only attributes named in meta
                replacement.meta.setdefault("_user_preserved_attributes", {})[name] = value
    return replacement


def channel_affine(width: int, channel: int, dims: int) -> nn.Module:
    """A scale and a shift for every channel."""
    zeros = torch.zeros([width if i == channel else 1 for i in range(1, dims)])
    return affine(zeros, zeros)


def on_last_dim(map: nn.Module, channel: int) -> nn.Module:
    """Apply a map of the last dimension to another one."""
    graph = fx.Graph()
    last = graph.call_function(torch.movedim, (graph.placeholder("x"), channel, -1))
    graph.output(graph.call_function(torch.movedim, (graph.call_module("map", (last,)), -1, channel)))
    return graph_of({"map": map}, graph, "OnLast")


def image_map(width: int, kernel: int, rank: int | None) -> nn.Sequential:
    """A convolution, or two of low rank, with a BatchNorm after."""
    convs = [nn.Conv2d(width, rank or width, kernel, padding=kernel // 2, bias=False)]
    if rank is not None:
        convs.append(nn.Conv2d(rank, width, 1, bias=False))
    return nn.Sequential(*convs, nn.BatchNorm2d(width))


def token_map(width: int, rank: int | None) -> nn.Module:
    """A linear layer, or two of low rank."""
    if rank is None:
        return nn.Linear(width, width)
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))


def zero_branch() -> nn.Module:
    """A branch whose output is zero."""
    graph = fx.Graph()
    graph.output(graph.call_function(torch.zeros_like, (graph.placeholder("x"),)))
    return called(graph_of({}, graph, "Nothing"))


def sequence_of(block: nn.Module, steps: tuple[str, ...]) -> nn.Sequential:
    """The modules and functions of a chain as nn.Sequential."""
    return nn.Sequential(
        *(FUNCTIONS[step[1:]]() if step.startswith("=") else block.get_submodule(step) for step in steps)
    )


def layers_after(block: nn.Module, structure: Structure) -> nn.Module | None:
    """A copy of the layers after the block's last sum, or None without any."""
    if not structure.after:
        return None
    own = copy.deepcopy(sequence_of(block, structure.after))
    return own[0] if len(own) == 1 else own


def half_block(
    form: Form, block: nn.Module, structure: Structure, arguments: Arguments
) -> tuple[nn.Module, dict[str, str]] | None:
    """A copy of one half of a block, 'mlp' or 'attention', with original paths of modules by their new ones.

    None for blocks without an attention branch and then an MLP branch that can be separated.
    """
    first, second = structure.sums if structure.kind == "transformer" else (None, None)
    if first is None or second is None or not first.attention:
        return None  # no transformer, or the MLP comes first
    branch = find_chain(structure.trace, second.stream, second.branch)
    if not branch:
        return None
    if form == "attention":
        half = without_mlp(block, branch, arguments)
        return None if half is None else (half, {})
    between = find_chain(structure.trace, first.index, second.stream)
    if between is None or structure.after is None:
        return None  # no chain of modules
    own = copy.deepcopy(block)
    before = sequence_of(own, between) if between else None
    module = correction(sequence_of(own, branch), layers_after(block, structure), before)
    half = with_signature(module, structure).eval()
    (prefix,) = (f"{path}." if path else "" for path, part in half.named_modules() if part is module)
    paths = {f"{prefix}branch.{i}": step for i, step in enumerate(branch)}
    return half, paths | {f"{prefix}before.{i}": step for i, step in enumerate(between)}


def without_mlp(block: nn.Module, branch: tuple[str, ...], arguments: Arguments) -> nn.Module | None:
    """A copy of the block whose MLP branch is zero; None if it does not run."""
    steps = [step for step in branch if not step.startswith("=")]
    if not steps:
        return None
    own = copy.deepcopy(block)
    for number, step in enumerate(steps):
        set_submodule(own, step, zero_branch() if number == 0 else nn.Identity())
    try:
        with torch.no_grad():
            arguments.run(own.eval())
    except (AttributeError, TypeError, RuntimeError):  # its code reads a removed part
        return None
    return own


def original_path(path: str, paths: dict[str, str]) -> str:
    """The path in the whole block of a layer in half of it."""
    for new, original in paths.items():
        if path == new or path.startswith(f"{new}."):
            return original + path.removeprefix(new)
    return path


@torch.no_grad()
def merge_corrections_(model: nn.Module) -> nn.Module:
    """Exchange corrections for standard layers with the same outputs where possible; returns the model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, fx.GraphModule) and module.meta.get("correction"):
            merged = merge_correction(module)
            if merged is not module:
                set_submodule(model, name, copy_attributes_(merged.train(module.training), module))
    return model


def merge_correction(module: nn.Module) -> nn.Module:
    """Standard layers with the output of a correction; the correction itself if there are none."""
    branch, after = getattr(module, "branch", None), getattr(module, "after", None)
    if branch is None:
        return after or nn.Identity()
    if isinstance(branch, nn.Linear):
        layer = add_identity(branch)
    elif isinstance(branch, nn.Sequential) and len(branch) == 2 and isinstance(branch[1], nn.BatchNorm2d):
        scale, shift = norm_as_affine(branch[1], torch.float64)
        conv: Any = copy.deepcopy(branch[0])
        conv.weight.copy_(conv.weight.double() * scale.view(-1, 1, 1, 1))
        conv.bias = nn.Parameter(shift.to(conv.weight))
        layer = add_identity(conv)
    else:
        return module
    return layer if after is None else nn.Sequential(layer, after)
