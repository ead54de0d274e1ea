"""Narrow 3x3 convolutions as torch operations: forward, both gradients, shapes alone, and which tensors fit.

y = x * W with stride 1 and one ring of zeros around x. The gradient of x is the same convolution of dy with W
turned by 180 degrees, in and out exchanged; that of W is summed in float32, always in the same order. The weight
may be of higher precision than x: it is rounded on its way in, and its gradient is not rounded at all.
"""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d as torch_conv2d

from ..train.overlapped_wgrad import behind_gate, when_due
from ..train.side_stream import used
from ._transforms import transformed
from ._triton.conv3x3_small_tiles import is_narrow_between, tile_for, weight_tile_for

_DTYPES = (torch.bfloat16, torch.float16)
HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs its kernels on a CPU, for tests
_LAST = torch.channels_last


def conv2d(x: Tensor, weight: Tensor) -> Tensor:
    """A 3x3 convolution with stride 1 and padding 1, by our kernels where they apply and by torch elsewhere.

    They apply to NHWC (channels_last) tensors with 16 or 32 channels on each side, in bfloat16 or float16,
    by their own dtype or under autocast, on a GPU with Triton.
    """
    if not kernels_run_on(x.device) or transformed() or not fits(x, weight):
        return torch_conv2d(x, weight, padding=1)
    weight = weight if torch.compiler.is_compiling() else behind_gate(weight)
    made: Tensor = torch.ops.replearn.narrow_convolution(x.to(computed_dtype(x)), weight, False)
    return made


def computed_dtype(x: Tensor) -> torch.dtype:
    """What a convolution of x is computed in."""
    kind = "cuda" if x.is_cuda else x.device.type  # asked often, and so it is faster
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether our kernels compute this convolution, where they run."""
    if not (computed_dtype(x) in _DTYPES and x.dim() == 4 and x.is_floating_point()):
        return False
    if not torch.is_autocast_enabled(x.device.type) and weight.dtype is not x.dtype:
        return False  # torch says what is wrong with it
    if x.device != weight.device or x.shape[1] != weight.shape[1] or weight.dtype is torch.float64:
        return False
    if not is_narrow_between(weight.shape[1], weight.shape[0]) or tuple(weight.shape[2:]) != (3, 3):
        return False
    # offsets are 32-bit numbers in the kernels
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    small = 0 < pixels * max(weight.shape[0], weight.shape[1]) < 2**31
    return small and x.is_contiguous(memory_format=_LAST)


def kernels_run_on(device: torch.device) -> bool:
    """Whether our kernels run there at all."""
    return (device.type == "cuda" or INTERPRETED) and HAS_TRITON


@torch.library.custom_op("replearn::narrow_convolution", mutates_args=())
def narrow_convolution(x: Tensor, weight: Tensor, flip: bool) -> Tensor:
    out: Tensor = empty_result(x, weight, flip)
    from ._triton.conv3x3_small import launch_convolve

    launch_convolve(dense(x), dense(weight), out, flip, tile_for(weight.shape[1], weight.shape[0]))
    return out


@torch.library.custom_op("replearn::narrow_convolution_weight", mutates_args=())
def narrow_convolution_weight(x: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    from ._triton.conv3x3_small_wgrad import launch_sum, launch_weight

    partials = launch_weight(dense(x), dense(grad), weight_tile_for(x.shape[1], grad.shape[1]))
    summed: Tensor = launch_sum(partials).to(dtype)
    return summed.permute(0, 3, 1, 2)


@narrow_convolution.register_fake
def empty_result(x: Tensor, weight: Tensor, flip: bool) -> Tensor:
    shape = (x.shape[0], weight.shape[1 if flip else 0], x.shape[2], x.shape[3])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_LAST)


@narrow_convolution_weight.register_fake
def _(x: Tensor, grad: Tensor, dtype: torch.dtype) -> Tensor:
    shape = (grad.shape[1], 3, 3, x.shape[1])
    return torch.empty(shape, dtype=dtype, device=x.device).permute(0, 3, 1, 2)


def remember(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    x, weight, ctx.flip = inputs
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.dtype, ctx.uses = weight.dtype, used(weight)
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)


def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    grad = grad.contiguous(memory_format=_LAST)
    of_x = None if weight is None else torch.ops.replearn.narrow_convolution(grad, weight, not ctx.flip)
    of_weight = None
    if x is not None:
        pair = (grad, x) if ctx.flip else (x, grad)
        work = partial(torch.ops.replearn.narrow_convolution_weight, *pair, ctx.dtype)
        of_weight = when_due(ctx.uses, work, *pair)
    return of_x, of_weight, None


narrow_convolution.register_autograd(differentiate, setup_context=remember)


def dense(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=_LAST)
