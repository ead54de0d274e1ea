"""Stem of a ResNet at inference: convolution, bias, ReLU and max pool of 3 x 3 pixels with stride 2 and padding 1.

    y = maxpool(relu(W * images + b)) = relu(maxpool(W * images) + b)

torch casts the images, convolves them with kernels that are made for more input channels, adds the bias and takes
the ReLU of every pixel, pools and stores the indices. The Triton kernels run in half precision, and in float32
where convolutions are in TF32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...costs.precision import convolves_in_tf32
from ._dispatch import (
    HALF,
    compute_dtype,
    in_transform,
    leaf,
    needs_grad,
    register_operation,
    runs_eagerly,
    span,
    triton_runs_on,
)

CHANNELS = 4  # of a padded pixel
# Output pixels of the convolution from which on the kernels pay, since their launches take longer than torch's: 42
# images of 224 x 224 in eager mode, 3 in a CUDA graph or in compiled code.
MIN_PIXELS_EAGER, MIN_PIXELS_GRAPH = 2**19, 2**15
MIN_PROGRAMS = 256  # fewer leave a GPU idle


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Output tile of a program, which loops over pooled lines. `benchmarks/stem.py` measures alternatives."""

    lanes: int  # pixels of a pooled line, and one more
    steps: int  # pooled lines
    num_warps: int = 4
    num_stages: int = 4

    def programs(self, images: int, down: int, across: int) -> int:
        """Programs for pooled images of this size, for each block of channels."""
        return images * -(-down // self.steps) * -(-across // (self.lanes - 1))


def walk_for(images: int, down: int, across: int) -> Walk:
    """The longest walk that gives a GPU enough programs."""
    walks = [Walk(lanes=64, steps=steps) for steps in (14, 7, 4, 2)]
    return next((walk for walk in walks if walk.programs(images, down, across) >= MIN_PROGRAMS), walks[-1])


@leaf
def stem(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int,
    padding: int,
    channels_last: bool,
    min_pixels: int = MIN_PIXELS_EAGER,
) -> Tensor:
    """relu(maxpool(conv(images, weight)) + bias), the bias being (channels, 1, 1).

    The kernels have no gradient: torch computes calls that need one, those that are exported, and those with fewer
    than `min_pixels` output pixels of the convolution.

    >>> stem(torch.ones(1, 3, 8, 8), torch.ones(16, 3, 3, 3), torch.zeros(16, 1, 1), 2, 1, False)[0, 0]
    tensor([[27., 27.],
            [27., 27.]])
    """
    given = images, weight, bias, stride, padding, channels_last
    if torch.compiler.is_compiling():  # is_exporting() is always true of what torch 2.11 compiles
        possible = not (torch.compiler._is_exporting_flag or in_transform())
    else:
        possible = runs_eagerly() and is_precision_of(weight)
    made: Tensor = _operation(*given) if possible and fits(*given, min_pixels) else reference(*given)
    return made


def reference(images: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int, *options: Any) -> Tensor:
    made = F.max_pool2d(F.conv2d(images, weight, None, stride, padding), 3, 2, 1)
    return made.add_(bias).relu_()  # in place: a float32 bias does not widen half precision


def fits(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int,
    padding: int,
    channels_last: bool,
    min_pixels: int = MIN_PIXELS_EAGER,
) -> bool:
    """True if the kernels compute this call, in the dtypes that `is_precision_of` allows."""
    if images.dim() != 4 or images.numel() < min_pixels * images.shape[1] * stride**2:
        return False
    if not triton_runs_on(images.device) or needs_grad(images, weight, bias):
        return False
    high, wide = convolved_size(images, weight, stride, padding)
    down, across = padded_size(high, wide, stride, weight.shape[2])
    return (
        images.shape[1] == weight.shape[1]
        and bias.shape == (len(weight), 1, 1)
        and can_tile(weight)
        and weight.dtype in (torch.float32, *HALF)
        and compute_dtype(images) is weight.dtype
        and images.dtype in (torch.float32, weight.dtype)
        and images.device == weight.device == bias.device
        and min(high, wide) > 0
        # the kernels have 32-bit offsets
        and len(images) * max(down * across * CHANNELS, high * wide * len(weight)) < 2**31
        and max(span(images), span(weight)) < 2**31
        and bias.is_contiguous()
        and 0 not in images.stride()
    )


def examples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments that the kernels take, for tests."""
    weight = 0.1 * torch.randn(16, 3, 7, 7, device=device, dtype=dtype)
    images, bias = torch.randn(2, 3, 20, 26, device=device), torch.randn(16, 1, 1, device=device)
    yield images.to(dtype), weight, bias, 2, 3, dtype in HALF, 1


def can_tile(weight: Tensor) -> bool:
    """True if the kernels' tiles cover this convolution."""
    channels, colours, side, across = weight.shape
    return colours <= CHANNELS and side == across and 3 <= side <= 16 and channels % 16 == 0


def convolved_size(images: Tensor, weight: Tensor, stride: int, padding: int) -> tuple[int, int]:
    high, wide = ((length + 2 * padding - weight.shape[2]) // stride + 1 for length in images.shape[2:])
    return high, wide


def padded_size(high: int, wide: int, stride: int, side: int) -> tuple[int, int]:
    """Lines and columns of a padded image; a line is a multiple of 16 pixels, for aligned reads."""
    return (high - 1) * stride + side, -(-((wide - 1) * stride + power_of_two(side)) // 16) * 16


def is_precision_of(weight: Tensor) -> bool:
    """True if torch convolves in the kernels' precision: half, or float32 rounded to TF32."""
    if weight.dtype is not torch.float32:
        return True
    return convolves_in_tf32() and torch.backends.cudnn.enabled and has_tf32(weight.device)


@cache
def has_tf32(device: torch.device) -> bool:
    """True if cuDNN has TF32 on this GPU, in Triton's interpreter, and on fake GPUs."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()


def _launch(
    images: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int, channels_last: bool
) -> Tensor:
    from ._triton.stem import launch_convolve_and_pool, launch_pad

    out = _fake(images, weight, bias, stride, padding, channels_last)
    if not is_precision_of(weight):  # in compiled code, which can't read the switch
        return out.copy_(reference(images, weight, bias, stride, padding))
    side = weight.shape[2]
    high, wide = convolved_size(images, weight, stride, padding)
    padded = weight.new_empty(len(images), *padded_size(high, wide, stride, side), CHANNELS)
    packed = weight.new_empty(len(weight), side, power_of_two(side) * CHANNELS)  # in the order of a padded line
    launch_pad(images, weight, padded, packed, padding)
    walk = walk_for(len(images), *out.shape[2:])
    launch_convolve_and_pool(padded, packed, bias, out, (high, wide), stride, channels_last, walk)
    return out


def _fake(images: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int, channels_last: bool) -> Tensor:
    high, wide = convolved_size(images, weight, stride, padding)
    shape = (images.shape[0], weight.shape[0], (high - 1) // 2 + 1, (wide - 1) // 2 + 1)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=weight.dtype, device=weight.device, memory_format=layout)


def _flops(images: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int, *_: Any, **__: Any) -> int:
    high, wide = convolved_size(images, weight, stride, padding)
    return 2 * len(images) * high * wide * weight.numel()


_operation = register_operation(
    "stem(Tensor images, Tensor weight, Tensor bias, int stride, int padding, bool channels_last) -> Tensor",
    _launch,
    _fake,
    _flops,
)
