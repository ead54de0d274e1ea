"""Merge an operator's sum with its input into the weight of its one linear map.

    x + W x + b   = (W + I) x + b
    x + K * x + b = (K + D) * x + b      D: the kernel that returns its input, 1 at each channel's own centre

Exact but for rounding, and one launch, one call and one read of x less. Only a branch that is nothing but that map
can take the sum up: a norm before it (HeadWise, MLP) or an activation inside (bottlenecks) keeps it outside.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..operators._base.plain import as_module, parts_of_residual
from ..surgery.replace import operators_of, plan_of, set_submodule


@dataclass(frozen=True, kw_only=True)
class Merge:
    """One sum of a deployed operator by name: the kind of layer that takes it up, or the reason why it stays."""

    name: str
    layer: str | None = None
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} -> {self.layer}" if self.layer else f"{self.name} stays: {self.reason}"


def find_merges(model: nn.Module, *, dtype: torch.dtype | None = None) -> tuple[Merge, ...]:
    """Say for every sum x + f(x) of a replaced model's operators whether `deploy(merge=True)` merges it.

    Touches nothing. `dtype` is the one that `deploy` is given. Operators without such a sum (Removal, NoWeights,
    WholeBlock) have no entry. Raises ReplearnError for a model that was not replaced.

    >>> import replearn
    >>> model = replearn.models.resnet32()
    >>> _ = replearn.replace_(model, replearn.plan(model))
    >>> [str(merge) for merge in replearn.deployment.find_merges(model.eval())][0]
    'layer1.3 -> Conv2d'
    """
    plan_of(model)
    return tuple(
        _judged(f"{name}.{path}".rstrip("."), branch, dtype)
        for name, operator in operators_of(model)
        for path, branch, _ in _residuals(operator.fuse())
    )


@torch.no_grad()
def merge_(fused: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """The deployed form of one operator with every sum merged that can be; in place, but for the outermost."""
    for path, branch, activation in list(_residuals(fused)):
        if _judged(path, branch, dtype).layer is None:
            continue
        made = merged(branch)
        if activation is not None:
            made = nn.Sequential(made, as_module(activation)).eval()
        if not path:
            return made
        set_submodule(fused, path, made)
    return fused


def merged(layer: nn.Module) -> nn.Module:
    """A copy of the layer that returns its input as well."""
    made: nn.Module = copy.deepcopy(layer)
    weight = made.get_parameter("weight").data  # in its own memory order
    rows = torch.arange(len(weight), device=weight.device)
    centre: list[Any] = [size // 2 for size in weight.shape[2:]]
    # a channel's own column is counted from the first of its group
    weight[(rows, rows % weight.shape[1], *centre)] += 1
    return made


def objection(layer: nn.Module) -> str | None:
    """Why x can't go into this layer's weight."""
    found: Any = layer
    if type(layer) is nn.Linear:
        same = found.in_features == found.out_features
        return None if same else f"its Linear maps {found.in_features} features to {found.out_features}"
    if type(layer) is not nn.Conv2d:
        return f"its branch is a {type(layer).__name__}, not one linear layer"
    if found.in_channels != found.out_channels or any(step != 1 for step in found.stride):
        return "its convolution changes the width or the resolution"
    if any(size % 2 == 0 for size in found.kernel_size):
        return f"its kernel of {tuple(found.kernel_size)} has no centre"
    padding = found._reversed_padding_repeated_twice[::-2]  # in numbers, also where it says 'same'
    sizes = zip(padding, found.kernel_size, found.dilation, strict=True)
    if any(2 * pad != dilation * (size - 1) for pad, size, dilation in sizes):
        return "its convolution is not padded to the size of x"
    return None


def _judged(name: str, branch: nn.Module, dtype: torch.dtype | None) -> Merge:
    reason = objection(branch)
    if reason is None and dtype is not None and type(branch) is nn.Linear:
        short = str(dtype).removeprefix("torch.")
        reason = f"under autocast x, and all after it, would leave float32 for {short}"
    return Merge(name=name, reason=reason) if reason else Merge(name=name, layer=type(branch).__name__)


def _residuals(fused: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Path, branch and activation of every sum x + f(x)."""
    for path, part in fused.named_modules():
        if (found := parts_of_residual(part)) is not None:
            yield path, *found
