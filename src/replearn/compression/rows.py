"""The rows of a linear layer or a convolution, as least squares takes them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..fitting.observe import unpadded
from .structure import is_transposed

CHUNK = 2**25  # numbers in a piece of patches
WORK, WORK_CUDA = 1e11, 2e13  # FLOPs for the products of one layer's inputs
PLACES = 256  # of an image are looked at; others tell little more


def matrix(layer: nn.Module) -> Tensor:
    """A layer's weight as (groups, R, K), in float64."""
    weight = layer.get_parameter("weight").detach().double()
    if is_transposed(layer):
        weight = weight.mT
    groups = layer.groups if isinstance(layer, (nn.Conv1d, nn.Conv2d)) else 1
    return weight.reshape(groups, len(weight) // groups, -1)


def set_matrix_(layer: nn.Module, weight: Tensor) -> None:
    parameter = layer.get_parameter("weight")
    flat = weight.reshape(-1, weight.shape[-1])
    with torch.no_grad():
        parameter.copy_(flat.mT if is_transposed(layer) else flat.reshape(parameter.shape))


def share_of_rows(layer: nn.Module, aim: Tensor, inputs: Sequence[Tensor]) -> float:
    """The part of all rows that keeps the products of a layer's inputs within the work for one layer."""
    groups, outputs, columns = matrix(layer).shape
    places = aim.numel() // (groups * outputs)
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        places = min(places, PLACES * len(aim))
    total = places / max(len(inputs[0]), 1) * sum(map(len, inputs))
    work = WORK_CUDA if aim.is_cuda else WORK
    return float(min(1.0, work / (2.0 * groups * columns**2 * max(total, 1.0))))


def rows(
    layer: nn.Module, x: Tensor, aim: Tensor, share: float = 1.0, tokens: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of x (groups, n, K) and aim (groups, n, R); the aim has the layout of the layer's output.

    With a `share` below 1, a fixed random part of the positions of every sample; `tokens` leaves padding out.
    """
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        yield from _conv_rows(layer, x, aim, share)
    else:
        x, aim = (unpadded(value.reshape(-1, value.shape[-1]), tokens) for value in (x, aim))
        if share < 1:
            at = some_places(len(x), math.ceil(len(x) * share)).to(x.device)
            x, aim = x[at], aim[at]
        x, aim = x.float(), aim.float()
        size = max(1, CHUNK // x.shape[-1])
        yield from ((a[None], b[None]) for a, b in zip(x.split(size), aim.split(size), strict=True))


def _conv_rows(
    layer: nn.Conv1d | nn.Conv2d, x: Tensor, aim: Tensor, share: float
) -> Iterator[tuple[Tensor, Tensor]]:
    if isinstance(layer, nn.Conv1d):
        x, aim = x[..., None], aim[..., None]
    (kh, kw), (sh, sw), (dh, dw) = ((*v, 1)[:2] for v in (layer.kernel_size, layer.stride, layer.dilation))
    top, left = (*padding_of(layer), 0)[:2]
    groups, channels = layer.groups, x.shape[1]
    x = F.pad(x.float(), (left, max(left, (kw - 1) * dw), top, max(top, (kh - 1) * dh)))
    padded = x.shape[-1]
    total = aim.shape[-2] * aim.shape[-1]
    at = some_places(total, math.ceil(min(total, PLACES) * share)).to(x.device)
    begin = (at // aim.shape[-1]) * sh * padded + (at % aim.shape[-1]) * sw
    steps = [i * dh * padded + j * dw for i in range(kh) for j in range(kw)]
    index = (begin[None] + torch.tensor(steps, device=x.device)[:, None]).reshape(-1)
    size = max(1, CHUNK // (channels * len(index)))
    for images, aims in zip(x.flatten(2).split(size), aim.float().flatten(2).split(size), strict=True):
        patches = images[..., index].view(len(images), groups, channels // groups, len(steps), len(at))
        patches = patches.permute(1, 0, 4, 2, 3).reshape(groups, len(images) * len(at), -1)
        wanted = aims[..., at].view(len(aims), groups, -1, len(at)).permute(1, 0, 3, 2)
        yield patches, wanted.reshape(groups, len(aims) * len(at), -1)


def padding_of(layer: nn.Conv1d | nn.Conv2d) -> tuple[int, ...]:
    """How much is added before the first value of each dimension, as the layer says it now."""
    if not isinstance(layer.padding, str):
        return layer.padding
    wide = zip(layer.kernel_size, layer.dilation, strict=True)
    return tuple((size - 1) * apart // 2 if layer.padding == "same" else 0 for size, apart in wide)


def some_places(total: int, most: int) -> Tensor:
    """All positions, or a fixed random choice of so many."""
    if total <= most:
        return torch.arange(total)
    return torch.randperm(total, generator=torch.Generator().manual_seed(total))[:most].sort().values
