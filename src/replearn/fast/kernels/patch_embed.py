"""A transformer's first layer as a torch operation: what it computes, shapes alone, and which tensors fit.

    y[t] = table[t]                          for the tokens before the patches
    y[t] = W patch[t - first] + table[t]     for the patches

The table holds what does not depend on the image: positions, the class token, the bias. Under autocast pixels
and W are in half precision, table and y in float32. torch rounds the image, convolves it (as of 2.11 with a kernel
that knows no tensor cores, where a patch is as large as its step), adds the bias, turns and joins tokens, and adds
positions; the kernel reads pixels and writes tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.flop_counter import register_flop_formula

from ..graphs.repeating import Run, first_run, kind_of, known_run, remember
from .conv3x3_small import computed_dtype, kernels_run_on
from .linear_residual import may_launch, wants_gradient

_HALF = (torch.bfloat16, torch.float16)
_library = torch.library.Library("replearn", "FRAGMENT")  # keeps the operation registered
_library.define("embed_patches(Tensor images, Tensor weight, Tensor table, int first) -> Tensor")


def embed(images: Tensor, weight: Tensor, table: Tensor, first: int) -> Tensor:
    """The tokens of images (batch, channels, height, width), in patches as large as the weight.

    The kernel takes a weight in half precision, as autocast computes in, and a table in float32, on a GPU with
    Triton, and knows no gradients: where one is wanted, or code is compiled or exported, torch computes the same.

    >>> embed(torch.ones(2, 3, 8, 8), torch.ones(5, 3, 4, 4), torch.zeros(1 + 4, 5), first=1)[0, :, 0]
    tensor([ 0., 48., 48., 48., 48.])
    """
    made: Tensor
    if has_torch_function_unary(images):  # as in residual_linear
        made = handle_torch_function(embed, (images,), images, weight, table, first)
        return made
    if not may_launch():
        return usual(images, weight, table, first)
    kind = kind_of("embed_patches", (images, weight, table), first, computed_dtype(images))
    if (run := known_run(kind)) is not None:
        return run(images, weight, table)
    if not fits(images, weight, table, first):
        return remember(kind, partial(usual, first=first))(images, weight, table)
    return first_run(kind, launched, torch.ops.replearn.embed_patches.default, (images, weight, table, first))


def usual(images: Tensor, weight: Tensor, table: Tensor, first: int) -> Tensor:
    patches = F.conv2d(images, weight, stride=weight.shape[2:]).flatten(2).transpose(1, 2) + table[first:]
    return torch.cat((table[:first].expand(len(images), -1, -1), patches), 1) if first else patches


def fits(images: Tensor, weight: Tensor, table: Tensor, first: int) -> bool:
    """Whether our kernel computes this, here and now."""
    if not kernels_run_on(images.device) or images.dim() != 4 or weight.dtype not in _HALF:
        return False
    channels, height, across = weight.shape[1:]
    down, right = images.shape[2] // height, images.shape[3] // across
    return (
        not wants_gradient(images, weight, table)
        and computed_dtype(images) is weight.dtype
        and table.dtype is torch.float32
        and images.dtype in (torch.float32, weight.dtype)
        and images.device == weight.device == table.device
        and (images.shape[1], images.shape[2], images.shape[3]) == (channels, down * height, right * across)
        and len(table) == first + down * right
        and can_be_cut(weight)
        and 0 < max(len(images) * table.numel(), reach(images)) < 2**31  # offsets are 32-bit numbers
        and weight.is_contiguous()
        and table.is_contiguous()
        and 0 not in images.stride()  # what is expanded may be larger than its memory: nothing to gain
    )


def reach(images: Tensor) -> int:
    """How far its last number lies from its first: for a part of a larger tensor, more than it holds."""
    return sum((size - 1) * step for size, step in zip(images.shape, images.stride(), strict=True))


def can_be_cut(weight: Tensor) -> bool:
    """Whether tiles of our kernel cover this layer."""
    return weight.shape[0] % 64 == 0 and weight[0].numel() % 64 == 0


@torch.library.impl(_library, "embed_patches", "CUDA")
@torch.library.impl(_library, "embed_patches", "CPU")  # in Triton's interpreter, for tests
def compute(images: Tensor, weight: Tensor, table: Tensor, first: int) -> Tensor:
    return launched(images, weight, table, first)[0]


def launched(images: Tensor, weight: Tensor, table: Tensor, first: int) -> tuple[Tensor, Run | None]:
    """The result, and what computes it of other such tensors."""
    from ._triton.patch_embed import launch

    out: Tensor = empty_result(images, weight, table, first)
    made = launch(images, weight, table, first, out)
    if made is None:
        return out, None
    again, shape = made.again(), out.shape

    def run(images: Tensor, weight: Tensor, table: Tensor) -> Tensor:
        out = table.new_empty(shape)
        again(images, weight, table, out)
        return out

    return out, run


@torch.library.register_fake("replearn::embed_patches", lib=_library)  # type: ignore[untyped-decorator]
def empty_result(images: Tensor, weight: Tensor, table: Tensor, first: int) -> Tensor:
    return table.new_empty((images.shape[0], *table.shape))


@register_flop_formula(torch.ops.replearn.embed_patches, get_raw=True)
def flops_of(images: Tensor, weight: Tensor, table: Tensor, first: int, out_val: Any = None) -> int:
    """Two for a multiply and add, as torch counts."""
    return 2 * len(images) * (len(table) - first) * weight.numel()
