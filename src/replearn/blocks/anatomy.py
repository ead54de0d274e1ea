"""Plain data: what a block is made of, as far as an operator needs to know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from torch import nn
from torch.fx.immutable_collections import immutable_dict

from ..errors import ReplearnError

Kind = Literal["basic", "bottleneck", "transformer", "any"]
Returns = Literal["tensor", "tuple"]


@dataclass(frozen=True, slots=True)
class Part:
    """Where a block keeps one piece: the path of a module (or parameter) below the block.

    `transposed` marks weights stored as (in, out), as GPT-2's Conv1D does; `rows` marks a
    slice of the output rows of a fused matrix, as the gate half of a packed SwiGLU.
    """

    path: str
    transposed: bool = False
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Anatomy:
    """One block: its kind, and which part of it plays which role.

    The roles are, by kind:

    - `basic`: `conv1`, `conv2`, `norm` (the last one), `activation`
    - `bottleneck`: `conv1`, `conv2`, `conv3`, `norm`, `activation`
    - `transformer`: `proj`, `norm1`, and for the MLP `norm2`, `up`, `down`, `activation`,
      and `gate` where the MLP has three matrices

    A role that is missing rules out the operators that read it; nothing else.
    """

    family: str
    kind: Kind
    parts: Mapping[str, Part] = field(default_factory=dict, hash=False)
    num_heads: int = 0
    input: str = "x"
    returns: Returns = "tensor"
    transition: str = ""  # why the block changes resolution or width; empty if it does not

    def __post_init__(self) -> None:
        for name, allowed in (("kind", get_args(Kind)), ("returns", get_args(Returns))):
            if getattr(self, name) not in allowed:
                raise ReplearnError(
                    f"The anatomy of {self.family!r} says {name}={getattr(self, name)!r}, which is one of "
                    f"{', '.join(map(repr, allowed))}."
                )
        object.__setattr__(self, "parts", immutable_dict(self.parts))  # plans are unchangeable


def anatomy(
    family: str,
    kind: Kind,
    *,
    num_heads: int = 0,
    input: str = "x",
    returns: Returns = "tensor",
    transition: str = "",
    **parts: str | Part,
) -> Anatomy:
    """An anatomy with its roles as keywords: `anatomy("mine", "basic", conv1="a", ...)`."""
    roles = {role: Part(part) if isinstance(part, str) else part for role, part in parts.items()}
    return Anatomy(family, kind, roles, num_heads, input, returns, transition)


def resolve(root: Any, path: str) -> Any:
    """Follow a dotted path of attributes; the empty path is the root itself."""
    for name in path.split(".") if path else ():
        root = getattr(root, name)
    return root


def has_parts(block: nn.Module, *paths: str) -> bool:
    """True if the block has something other than None at every one of these paths."""
    try:
        return all(resolve(block, path) is not None for path in paths)
    except AttributeError:
        return False


def is_a(block: nn.Module, *class_paths: str) -> bool:
    """True if the block is of one of these classes, with that class's own forward.

    Classes are compared by name, so that no optional library is imported. A subclass that overrides `forward`
    computes something else, and is not recognised.
    """
    cls: Any = type(block)
    for base in cls.__mro__:
        if f"{base.__module__}.{base.__qualname__}" in class_paths:
            return bool(cls.forward is base.forward)
    return False


def shape_change(block: nn.Module, *convs: str) -> str:
    """Why a residual block with these convolutions changes resolution or width; '' if it does not."""
    layers = [resolve(block, path) for path in convs]
    if getattr(block, "downsample", None) is not None:
        return "its shortcut changes the shape (downsample)"
    if any(stride != 1 for layer in layers for stride in layer.stride):
        return "changes resolution"
    if layers[0].in_channels != layers[-1].out_channels:
        return f"changes width from {layers[0].in_channels} to {layers[-1].out_channels}"
    return ""


def resnet_anatomy(block: nn.Module, family: str, module: str, activations: tuple[str, str]) -> Anatomy | None:
    """The anatomy of a BasicBlock or Bottleneck of a library's ResNet file, or None."""
    for kind, name, count in (("basic", "BasicBlock", 2), ("bottleneck", "Bottleneck", 3)):
        if is_a(block, f"{module}.{name}"):
            convs = [f"conv{i + 1}" for i in range(count)]
            parts = {conv: conv for conv in convs}
            parts |= {"norm": f"bn{count}", "activation": activations[count - 2]}
            return anatomy(family, kind, transition=shape_change(block, *convs), **parts)  # type: ignore[arg-type]
    return None
