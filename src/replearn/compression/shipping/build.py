"""Build the standard model, give it the compressed model's weights, and refuse every other difference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...blocks.stacks import class_path
from ...costs.fake import without_weights
from ...errors import ReplearnError, class_and_line
from .lists import Shortened, full_name

INDICES = {"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx"}
IGNORED = {
    *INDICES,
    "drop_prob",
    "drop_path",
    "p",
    "training",
}  # attributes that may differ; these act in training
IDENTITIES = ("Identity", "Dropout", "DropPath", "StochasticDepth")  # identities in eval mode


@dataclass(frozen=True, eq=False)
class Build:
    """A documented call of a library that builds a standard model."""

    library: str
    make: Callable[[], nn.Module]
    call: str  # as Python: "timm.create_model"
    arguments: dict[str, Any]  # may hold classes


def first_match(short: Shortened, builds: Iterable[Build]) -> tuple[nn.Module, Build]:
    """The first build that equals the compressed model without its removed blocks, with its weights.

    Raises ReplearnError that names a difference of the closest build.
    """
    reasons: list[tuple[int, str]] = []
    for build in builds:
        try:
            built = without_weights(build.make)
        except (TypeError, ValueError, RuntimeError, AssertionError, AttributeError, KeyError) as error:
            reasons.append((10**9, f"{build.call} could not build it ({class_and_line(error)})"))
            continue
        found = differences(short, built)
        if not found:
            copy_weights_(built, short)
            return built.eval(), build
        reasons.append((len(found), found[0]))
    if not reasons:
        raise ReplearnError(
            f"{full_name(short.model)} has no argument for its number of blocks that is known here."
        )
    raise ReplearnError(
        f"The compressed model is no standard {type(short.model).__name__}: {min(reasons)[1]}. Give what it was "
        "built with as arguments={...}, or export it as pt2 or ONNX."
    )


def differences(short: Shortened, built: nn.Module) -> list[str]:
    """Differences of a built model: names and shapes of tensors, classes and settings of modules."""
    old = short.model
    found = []
    wanted = {new: tuple(t.shape) for name, t in old.state_dict().items() if (new := short.new_name(name))}
    given = {name: tuple(t.shape) for name, t in built.state_dict().items()}
    for name in [*wanted, *(name for name in given if name not in wanted)]:
        if wanted.get(name) != given.get(name):
            found.append(f"{name} is {wanted.get(name, 'not there')}, and {given.get(name, 'not there')} in that")
    if found:
        return found
    modules = dict(built.named_modules())
    counts: set[Any] = {(one.length, len(one.kept)) for one in short.changed}
    for name, module in old.named_modules():
        new = short.new_name(name) if name else ""
        if new is None or type(module).__name__.endswith(IDENTITIES):  # as SegformerDropPath
            continue
        other = modules.get(new)
        if other is None or class_path(other) != class_path(module):  # parametrized: one class each
            there = "not there" if other is None else f"{type(other).__name__} in that"
            found.append(f"{new or 'the model'} is {type(module).__name__}, and {there}")
            continue
        for key, value in vars(module).items():
            theirs: Any = vars(other).get(key)
            if key in IGNORED or key.startswith("_") or not simple(value) or (value, theirs) in counts:
                continue
            if value != theirs:
                found.append(f"{new or 'the model'}.{key} is {value!r}, and {theirs!r} in that")
    return found


def simple(value: Any) -> bool:
    """True for a setting that can be compared: a number, a text, or a tuple of those."""
    if isinstance(value, tuple):
        return all(simple(part) for part in value)
    return value is None or isinstance(value, (bool, int, float, str))


@torch.no_grad()
def copy_weights_(built: nn.Module, short: Shortened) -> None:
    """Copy the weights to a built model; tied ones stay tied, and non-persistent buffers are copied too."""
    old = short.model
    tensors: dict[str, Tensor] = {
        **dict(old.named_parameters(remove_duplicate=False)),
        **dict(old.named_buffers(remove_duplicate=False)),
    }
    own: dict[str, Tensor] = copy.deepcopy(
        {new: tensor for name, tensor in tensors.items() if (new := short.new_name(name))}
    )
    for name in {**built.state_dict(), **dict(built.named_buffers(remove_duplicate=False))}:
        set_tensor(built, name, own[name])
    modules = {short.new_name(name) if name else "": module for name, module in old.named_modules()}
    for name, module in built.named_modules():  # tensors that are plain attributes
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and name in modules:
                vars(module)[key] = copy.deepcopy(vars(modules[name])[key])


def set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, key = name.rpartition(".")
    module = model.get_submodule(parent)
    (module._parameters if key in module._parameters else module._buffers)[key] = tensor  # type: ignore[assignment]
