"""The inputs and targets of a linear layer or a convolution as rows for least squares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..fitting.observe import unpadded
from .structure import is_transposed

CHUNK = 2**25  # elements of the patches in a chunk
WORK, WORK_CUDA = 1e11, 2e13  # FLOPs for the products of one layer's inputs
MAX_POSITIONS = 256  # of an image; more add little


def weight_matrix(layer: nn.Module) -> Tensor:
    """A layer's weight as (groups, R, K), in float64."""
    weight = layer.get_parameter("weight").detach().double()
    if is_transposed(layer):
        weight = weight.mT
    groups = layer.groups if isinstance(layer, (nn.Conv1d, nn.Conv2d)) else 1
    return weight.reshape(groups, len(weight) // groups, -1)


def set_weight_matrix_(layer: nn.Module, weight: Tensor) -> None:
    parameter = layer.get_parameter("weight")
    flat = weight.reshape(-1, weight.shape[-1])
    with torch.no_grad():
        parameter.copy_(flat.mT if is_transposed(layer) else flat.reshape(parameter.shape))


def row_fraction(layer: nn.Module, target: Tensor, inputs: Sequence[Tensor]) -> float:
    """The fraction of all rows with which the products of a layer's inputs stay within WORK."""
    groups, outputs, columns = weight_matrix(layer).shape
    num_positions = target.numel() // (groups * outputs)
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        num_positions = min(num_positions, MAX_POSITIONS * len(target))
    total = num_positions / max(len(inputs[0]), 1) * sum(map(len, inputs))
    work = WORK_CUDA if target.is_cuda else WORK
    return float(min(1.0, work / (2.0 * groups * columns**2 * max(total, 1.0))))


def layer_rows(
    layer: nn.Module, x: Tensor, target: Tensor, share: float = 1.0, tokens: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Chunks of x (groups, n, K) and of the target (groups, n, R), which has the layout of the layer's output.

    With a `share` below 1, a fixed random part of the positions of every sample; without the padding in `tokens`.
    """
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        yield from _conv_rows(layer, x, target, share)
    else:
        x, target = (unpadded(value.reshape(-1, value.shape[-1]), tokens) for value in (x, target))
        if share < 1:
            positions = sample_positions(len(x), math.ceil(len(x) * share)).to(x.device)
            x, target = x[positions], target[positions]
        x, target = x.float(), target.float()
        size = max(1, CHUNK // x.shape[-1])
        yield from ((a[None], b[None]) for a, b in zip(x.split(size), target.split(size), strict=True))


def _conv_rows(
    layer: nn.Conv1d | nn.Conv2d, x: Tensor, target: Tensor, share: float
) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(layer, nn.Conv1d):
        x, target = x[..., None], target[..., None]
    (kh, kw), (sh, sw), (dh, dw) = ((*v, 1)[:2] for v in (layer.kernel_size, layer.stride, layer.dilation))
    top, left = (*padding_of(layer), 0)[:2]
    groups, channels = layer.groups, x.shape[1]
    x = F.pad(x.float(), (left, max(left, (kw - 1) * dw), top, max(top, (kh - 1) * dh)))
    padded = x.shape[-1]
    total = target.shape[-2] * target.shape[-1]
    positions = sample_positions(total, math.ceil(min(total, MAX_POSITIONS) * share)).to(x.device)
    start = (positions // target.shape[-1]) * sh * padded + (positions % target.shape[-1]) * sw
    steps = [i * dh * padded + j * dw for i in range(kh) for j in range(kw)]
    index = (start[None] + torch.tensor(steps, device=x.device)[:, None]).reshape(-1)
    size = max(1, CHUNK // (channels * len(index)))
    for images, targets in zip(x.flatten(2).split(size), target.float().flatten(2).split(size), strict=True):
        patches = images[..., index].view(len(images), groups, channels // groups, len(steps), len(positions))
        patches = patches.permute(1, 0, 4, 2, 3).reshape(groups, len(images) * len(positions), -1)
        chosen = targets[..., positions].view(len(targets), groups, -1, len(positions)).permute(1, 0, 3, 2)
        yield patches, chosen.reshape(groups, len(targets) * len(positions), -1)


def padding_of(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, ...]:
    """The layer's padding before the first value of each dimension."""
    if not isinstance(layer.padding, str):
        return layer.padding
    sizes = zip(layer.kernel_size, layer.dilation, strict=True)
    return tuple((size - 1) * dilation // 2 if layer.padding == "same" else 0 for size, dilation in sizes)


def sample_positions(total: int, most: int) -> Tensor:
    """All positions, or a fixed random choice of at most so many."""
    if total <= most:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(total))[:most].sort().values
