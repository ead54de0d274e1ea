"""Half blocks: attention out and MLP kept, or the other way round, for blocks of two residual branches."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .calls import Arguments
from .structure import Structure
from .sums import Sum, chain

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
