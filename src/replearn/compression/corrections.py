"""What stands in a block's place: nothing, a linear map, half of the block; and the standard form of each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from ..surgery.replace import set_submodule
from .calls import Arguments
from .structure import Structure
from .trace import Sum, chain


class Correction(nn.Module):
    """g(x) = after(x + map(x)): a linear map on tokens or pixels, with what followed the block's last sum.

    Takes whatever the block took, and returns a tuple where the block did.
    """

    def __init__(
        self, map: nn.Module | None, after: nn.Module | None = None, *, argument: str = "", length: int = 0
    ) -> None:
        super().__init__()
        self.map, self.after = map, after
        self.argument, self.length = argument, length

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x: Tensor = kwargs[self.argument] if self.argument in kwargs else args[0]
        y = x if self.map is None else x + self.map(x)
        if self.after is not None:
            y = self.after(y)
        return (y, *([None] * (self.length - 1))) if self.length else y


def pass_through(argument: str, length: int) -> nn.Module:
    """Nothing, in a form that takes what a block took and returns as many values."""
    return Correction(None, argument=argument, length=length) if argument or length else nn.Identity()


def adopt_attributes_(stand_in: nn.Module, block: nn.Module) -> nn.Module:
    """Give a stand-in the block's plain attributes, such as its number, which the model's code may read."""
    for name, value in vars(block).items():
        plain = value is None or isinstance(value, (bool, int, float, str))
        if plain and not name.startswith("_") and name != "training" and not hasattr(stand_in, name):
            setattr(stand_in, name, value)
    return stand_in


class Channels(nn.Module):
    """A scale and a shift for every channel."""

    def __init__(self, width: int, channel: int, dims: int) -> None:
        super().__init__()
        shape = [width if i == channel else 1 for i in range(1, dims)]
        self.scale = nn.Parameter(torch.zeros(shape))
        self.shift = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class OnLast(nn.Module):
    """A map of the last dimension, for features that stand in another."""

    def __init__(self, map: nn.Module, channel: int) -> None:
        super().__init__()
        self.map, self.channel = map, channel

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.map(x.movedim(self.channel, -1)).movedim(-1, self.channel)
        return made


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


FUNCTIONS = {"=relu": nn.ReLU, "=gelu": nn.GELU, "=silu": nn.SiLU}


class HalfBlock(nn.Module):
    """One branch of a block: h = before(x), then after(h + branch(h)). Takes what the block took."""

    def __init__(
        self,
        branch: nn.Module,
        before: nn.Module | None = None,
        after: nn.Module | None = None,
        *,
        argument: str = "",
        length: int = 0,
    ) -> None:
        super().__init__()
        self.before, self.branch, self.after = before, branch, after
        self.argument, self.length = argument, length

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x: Tensor = kwargs[self.argument] if self.argument in kwargs else args[0]
        h = x if self.before is None else self.before(x)
        y = h + self.branch(h)
        if self.after is not None:
            y = self.after(y)
        return (y, *([None] * (self.length - 1))) if self.length else y


class Nothing(nn.Module):
    """A branch that adds nothing."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(x)


def modules_of(block: nn.Module, way: tuple[str, ...] | None) -> nn.Sequential | None:
    """The modules and functions of a chain, one after another; dropout and empty ones left out."""
    if way is None:
        return None
    found = [FUNCTIONS[step]() if step in FUNCTIONS else block.get_submodule(step) for step in way]
    return nn.Sequential(*found)


def after_of(block: nn.Module, structure: Structure) -> nn.Module | None:
    """A copy of what follows the block's last sum, or None where nothing does."""
    made = modules_of(block, structure.after)
    if made is None or not len(made):
        return None
    own = copy.deepcopy(made)
    return own[0] if len(own) == 1 else own


def mlp_half(
    block: nn.Module, structure: Structure, *, argument: str, length: int
) -> tuple[HalfBlock, dict[str, str]] | None:
    """The block without its attention, and where in the block its parts come from; None where that fails."""
    found = _two(structure)
    if found is None or found[0].attention is False or structure.after is None:
        return None  # the MLP comes first, or what follows is unclear
    first, second = found
    trace = structure.trace
    branch = chain(trace, second.stream, second.branch)
    between = chain(trace, first.index, second.stream)
    if not branch or between is None:
        return None
    half = HalfBlock(
        modules_of(block, branch) or nn.Identity(),
        modules_of(block, between) if between else None,
        after_of(block, structure),
        argument=argument,
        length=length,
    )
    paths = {f"branch.{i}": step for i, step in enumerate(branch)}
    paths |= {f"before.{i}": step for i, step in enumerate(between)}
    return half, paths


def attention_half(block: nn.Module, structure: Structure, arguments: Arguments) -> nn.Module | None:
    """The block without its MLP, as a copy with nothing in the MLP's place; None where that fails."""
    found = _two(structure)
    if found is None or found[0].attention is False:
        return None
    branch = chain(structure.trace, found[1].stream, found[1].branch)
    steps = [step for step in branch or () if step not in FUNCTIONS]
    if not steps:
        return None
    own = copy.deepcopy(block)
    for number, step in enumerate(steps):
        parent, _, key = step.rpartition(".")
        own.get_submodule(parent)._modules[key] = Nothing() if number == 0 else nn.Identity()
    try:
        with torch.no_grad():
            arguments.run(own.eval())
    except (AttributeError, TypeError, RuntimeError):  # its code looks into the part that is gone
        return None
    return own


def _two(structure: Structure) -> tuple[Sum, Sum] | None:
    if structure.kind != "transformer" or len(structure.sums) != 2:
        return None
    return structure.sums[0], structure.sums[1]


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
        if isinstance(module, Correction) and not module.argument and not module.length:
            made = merged(module)
            if made is not None:
                set_submodule(model, name, adopt_attributes_(made.train(module.training), module))
    return model


def merged(correction: Correction) -> nn.Module | None:
    """Standard layers that compute the same, or None."""
    inner: Any = correction.map
    if inner is None:
        return correction.after or nn.Identity()
    if isinstance(inner, nn.Linear):
        layer: nn.Module = skip_init(nn.Linear, inner.in_features, inner.out_features).to(inner.weight)
        weight = inner.weight + torch.eye(inner.in_features).to(inner.weight)
        layer.get_parameter("weight").copy_(weight)
        layer.get_parameter("bias").copy_(inner.bias)
    elif isinstance(inner, nn.Sequential) and len(inner) == 2 and isinstance(inner[0], nn.Conv2d):
        conv: Any = inner[0]
        norm: Any = inner[1]
        gain = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        weight = conv.weight.double() * gain[:, None, None, None]
        middle = conv.kernel_size[0] // 2
        weight[:, :, middle, middle] += torch.eye(len(weight)).to(weight)
        layer = skip_init(nn.Conv2d, len(weight), len(weight), conv.kernel_size, padding=middle).to(conv.weight)
        layer.get_parameter("weight").copy_(weight)
        layer.get_parameter("bias").copy_(norm.bias.double() - norm.running_mean.double() * gain)
    else:
        return None
    return layer if correction.after is None else nn.Sequential(layer, correction.after)
