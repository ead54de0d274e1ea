"""3x3 convolutions with 16 or 32 channels, stride 1 and padding 1, for training in half precision.

The gradient of x is the same convolution of dy with W rotated by 180 degrees, in and out exchanged; that of W is
summed in float32, in a fixed order. W may be in float32: it is rounded as it is read, and its gradient is not.
Tiles are fixed, since autotuning would fall into the capture of a step; `benchmarks/narrow_convolutions.py`
measures alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d
from torch.utils.flop_counter import register_flop_formula

from ..train.overlapped_wgrad import count_use, gated_weight, overlap
from ._dispatch import HALF, compute_dtype, in_transform, triton_runs_on

CHANNELS = (16, 32)  # with 64 cuDNN's kernels are as fast
COLORS = 3  # channels of images, which may go in but never come out
_LAST = torch.channels_last


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A forward pass, or the gradient of the input."""

    pixels: int  # columns of a program
    strip: int  # rows of the result that it walks down; two more are read
    pack: bool  # two pixels at once, from one read of the four that they see
    num_warps: int  # 4 and 64 pixels: Hopper's wgmma; fewer of either: mma.sync
    num_stages: int  # 1: reads through L1; more: ahead of their use, past L1


@dataclass(frozen=True, kw_only=True)
class WeightTile:
    """The gradient of the weight."""

    pixels: int
    strip: int  # rows that a worker walks down before it goes to other columns
    roll: int  # rows that are read at once, each for all three rows of the window
    carry: bool = False  # dy's last two rows stay for the next step, and are not read again
    workers: int  # at most: each writes a partial sum
    num_warps: int
    num_stages: int


# by the larger of in and out channels; 3 is a first convolution of images
TILES = {
    3: Tile(pixels=64, strip=16, pack=True, num_warps=2, num_stages=1),
    16: Tile(pixels=64, strip=16, pack=False, num_warps=2, num_stages=3),
    32: Tile(pixels=128, strip=8, pack=False, num_warps=8, num_stages=3),
}
WEIGHT_TILES = {
    3: WeightTile(pixels=64, strip=32, roll=4, carry=True, workers=528, num_warps=4, num_stages=3),
    16: WeightTile(pixels=128, strip=32, roll=2, workers=264, num_warps=4, num_stages=3),
    32: WeightTile(pixels=64, strip=16, roll=2, workers=132, num_warps=8, num_stages=3),
}


def has_tile(cin: int, cout: int) -> bool:
    """True if the kernels are used for a 3x3 convolution with these channels."""
    return cout in CHANNELS and (cin in CHANNELS or cin == COLORS)


def tile_key(cin: int, cout: int) -> int:
    return COLORS if COLORS in (cin, cout) else max(cin, cout)


def conv3x3_small(x: Tensor, weight: Tensor) -> Tensor:
    """conv2d(x, weight, padding=1).

    The kernels take channels_last tensors in half precision, by dtype or under autocast; torch computes the rest.
    """
    if not fits(x, weight):
        return reference(x, weight)
    weight = weight if torch.compiler.is_compiling() else gated_weight(weight)
    made: Tensor = torch.ops.replearn.conv3x3_small(x.to(compute_dtype(x)), weight, False)
    return made


def reference(x: Tensor, weight: Tensor) -> Tensor:
    return conv2d(x, weight, padding=1)


def fits(x: Tensor, weight: Tensor) -> bool:
    """True if the kernels compute this call."""
    if not triton_runs_on(x.device) or in_transform():
        return False
    if not (compute_dtype(x) in HALF and x.dim() == 4 and x.is_floating_point()):
        return False
    if not torch.is_autocast_enabled(x.device.type) and weight.dtype is not x.dtype:
        return False  # torch raises
    if x.device != weight.device or x.shape[1] != weight.shape[1] or weight.dtype is torch.float64:
        return False
    if not has_tile(weight.shape[1], weight.shape[0]) or tuple(weight.shape[2:]) != (3, 3):
        return False
    # the kernels have 32-bit offsets
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    small = 0 < pixels * max(weight.shape[0], weight.shape[1]) < 2**31
    return small and x.is_contiguous(memory_format=_LAST)


def examples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments that the kernels take, for tests."""
    if dtype in HALF:
        for cin, cout, height in ((16, 16, 34), (16, 32, 6), (32, 32, 6)):
            x = torch.randn(2, cin, height, 5, device=device, dtype=dtype)
            yield dense(x), 0.1 * torch.randn(cout, cin, 3, 3, device=device, dtype=dtype)
        x = torch.randn(1, 3, 5, 8, device=device)  # under autocast
        yield dense(x), 0.2 * torch.randn(16, 3, 3, 3, device=device)


@torch.library.custom_op("replearn::conv3x3_small", mutates_args=())
def _launch(x: Tensor, weight: Tensor, flip: bool) -> Tensor:
    from ._triton.conv3x3_small import launch_convolve

    out: Tensor = _fake(x, weight, flip)
    launch_convolve(dense(x), dense(weight), out, flip, TILES[tile_key(*weight.shape[:2])])
    return out


@torch.library.custom_op("replearn::conv3x3_small_wgrad", mutates_args=())
def _launch_wgrad(x: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    from ._triton.conv3x3_small import launch_sum, launch_weight

    partials = launch_weight(dense(x), dense(grad), WEIGHT_TILES[tile_key(x.shape[1], grad.shape[1])])
    summed: Tensor = launch_sum(partials).to(dtype)
    return summed.permute(0, 3, 1, 2)


@_launch.register_fake
def _fake(x: Tensor, weight: Tensor, flip: bool) -> Tensor:
    shape = (x.shape[0], weight.shape[1 if flip else 0], x.shape[2], x.shape[3])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_LAST)


@_launch_wgrad.register_fake
def _fake_wgrad(x: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    shape = (grad.shape[1], 3, 3, x.shape[1])
    return torch.empty(shape, dtype=dtype, device=x.device).permute(0, 3, 1, 2)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    x, weight, ctx.flip = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.dtype, ctx.uses = weight.dtype, count_use(weight)
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    grad = grad.contiguous(memory_format=_LAST)
    d_x = None if weight is None else torch.ops.replearn.conv3x3_small(grad, weight, not ctx.flip)
    d_weight = None
    if x is not None:
        pair = (grad, x) if ctx.flip else (x, grad)
        work = partial(torch.ops.replearn.conv3x3_small_wgrad, *pair, ctx.dtype)
        d_weight = overlap(ctx.uses, work, *pair)
    return d_x, d_weight, None


_launch.register_autograd(_backward, setup_context=_setup_context)


def dense(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=_LAST)


@register_flop_formula(torch.ops.replearn.conv3x3_small, get_raw=True)
def _flops(x: Tensor, weight: Tensor, flip: bool, out_val: Any = None) -> int:
    return 2 * x.numel() // x.shape[1] * weight.numel()


@register_flop_formula(torch.ops.replearn.conv3x3_small_wgrad, get_raw=True)
def _flops_wgrad(x: Tensor, grad: Tensor, dtype: torch.dtype, out_val: Any = None) -> int:
    return 2 * x.numel() * 9 * grad.shape[1]
