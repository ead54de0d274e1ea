"""Patch embedding of a vision transformer, from images to tokens, for inference under autocast.

    y[t] = table[t]                          for the tokens before the patches
    y[t] = W patch[t - first] + table[t]     for the patches

The table holds positions, class token and bias. Pixels and W are in half precision, table and y in float32. torch
casts the image, convolves it (in 2.11 without tensor cores where stride equals kernel size), adds the bias,
transposes, concatenates and adds positions; the kernel reads pixels and writes tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dispatch import (
    HALF,
    compute_dtype,
    leaf,
    needs_grad,
    register_operation,
    runs_eagerly,
    span,
    triton_runs_on,
)


@leaf
def patch_embed(images: Tensor, weight: Tensor, table: Tensor, first: int) -> Tensor:
    """The tokens of images (batch, channels, height, width), in patches as large as the weight.

    The kernel takes a weight in autocast's half precision and a table in float32. It has no gradient: torch
    computes calls that need one, and those that are compiled or exported.

    >>> patch_embed(torch.ones(2, 3, 8, 8), torch.ones(5, 3, 4, 4), torch.zeros(1 + 4, 5), first=1)[0, :, 0]
    tensor([ 0., 48., 48., 48., 48.])
    """
    given = images, weight, table, first
    made: Tensor = _operation(*given) if runs_eagerly() and fits(*given) else reference(*given)
    return made


def reference(images: Tensor, weight: Tensor, table: Tensor, first: int) -> Tensor:
    patches = F.conv2d(images, weight, stride=weight.shape[2:]).flatten(2).transpose(1, 2) + table[first:]
    return torch.cat((table[:first].expand(len(images), -1, -1), patches), 1) if first else patches


def fits(images: Tensor, weight: Tensor, table: Tensor, first: int) -> bool:
    """True if the kernel computes this call."""
    if not triton_runs_on(images.device) or images.dim() != 4 or weight.dtype not in HALF:
        return False
    channels, height, width = weight.shape[1:]
    down, across = images.shape[2] // height, images.shape[3] // width
    return (
        not needs_grad(images, weight, table)
        and compute_dtype(images) is weight.dtype
        and table.dtype is torch.float32
        and images.dtype in (torch.float32, weight.dtype)
        and images.device == weight.device == table.device
        and images.shape[1:] == (channels, down * height, across * width)
        and len(table) == first + down * across
        and can_tile(weight)
        and 0 < max(len(images) * table.numel(), span(images)) < 2**31  # the kernel has 32-bit offsets
        and weight.is_contiguous()
        and table.is_contiguous()
        and 0 not in images.stride()
    )


def examples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments that the kernel takes under autocast, for tests."""
    if dtype in HALF:
        weight = 0.1 * torch.randn(64, 3, 8, 8, device=device, dtype=dtype)
        images = torch.randn(2, 3, 16, 24, device=device)
        yield images.to(memory_format=torch.channels_last), weight, torch.randn(1 + 6, 64, device=device), 1
        yield images[:, :, :, :16], weight, torch.randn(4, 64, device=device), 0


def can_tile(weight: Tensor) -> bool:
    """True if the kernel's tiles cover this layer."""
    return weight.shape[0] % 64 == 0 and weight[0].numel() % 64 == 0


def _launch(images: Tensor, weight: Tensor, table: Tensor, first: int) -> Tensor:
    from ._triton.patch_embed import launch

    out = table.new_empty((len(images), *table.shape))
    launch(images, weight, table, first, out)
    return out


def _flops(images: Tensor, weight: Tensor, table: Tensor, first: int, out_val: Any = None) -> int:
    return 2 * len(images) * (len(table) - first) * weight.numel()


_operation = register_operation(
    "patch_embed(Tensor images, Tensor weight, Tensor table, int first) -> Tensor",
    _launch,
    fake=lambda images, weight, table, first: table.new_empty((images.shape[0], *table.shape)),
    flops=_flops,
)
