"""Stem of a ResNet at inference: convolution, max pool, bias and ReLU.

    y = relu(maxpool(W * images) + b)        a pool of 3 x 3 pixels with stride 2 and padding 1

torch casts the images, convolves them with kernels that are made for more input channels, pools and stores the
indices, adds the bias and takes the ReLU. The Triton kernels run in half precision, and in float32 where its
convolutions are in TF32.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.flop_counter import register_flop_formula

from ...costs.precision import convolves_in_tf32, noted
from ._dispatch import (
    HALF,
    INTERPRETED,
    compute_dtype,
    in_transform,
    needs_grad,
    runs_eagerly,
    span,
    triton_runs_on,
)
from ._triton.stem_tiles import walk_for

CHANNELS = 4  # of a padded pixel
POOL = (3, 2, 1)  # window, stride and padding
# Output pixels of the convolution from which on the kernels pay, since their launches take longer than torch's: 42
# images of 224 x 224 in eager mode, 3 in a CUDA graph or in compiled code.
MIN_PIXELS_EAGER, MIN_PIXELS_GRAPH = 2**19, 2**15
_library = torch.library.Library("replearn", "FRAGMENT")  # keeps the operation registered
_library.define("stem(Tensor images, Tensor weight, Tensor bias, int[] sizes, bool channels_last) -> Tensor")


class Sizes(NamedTuple):
    """Stride and padding of the convolution; window, stride and padding of the pool; each in both directions."""

    stride: int
    padding: int
    pool_window: int
    pool_stride: int
    pool_padding: int

    def convolved(self, length: int, side: int) -> int:
        return (length + 2 * self.padding - side) // self.stride + 1

    def pooled(self, length: int) -> int:
        return (length + 2 * self.pool_padding - self.pool_window) // self.pool_stride + 1

    def padded(self, convolved: tuple[int, int], side: int) -> tuple[int, int]:
        """Lines and columns of a padded image; a line is a multiple of 16 pixels, for aligned reads."""
        down, across = ((length - 1) * self.stride for length in convolved)
        return down + side, -(-(across + power_of_two(side)) // 16) * 16


def stem(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    sizes: tuple[int, ...],
    channels_last: bool,
    min_pixels: int = MIN_PIXELS_EAGER,
) -> Tensor:
    """relu(maxpool(conv(images, weight)) + bias), the bias being (channels, 1, 1).

    The kernels have no gradient: torch computes calls that need one, those that are exported, and those with fewer
    than `min_pixels` output pixels of the convolution. Compiled code launches the kernels itself in half precision
    and where the TF32 switch is `noted`; elsewhere it calls the operation, which reads the switch when it runs.

    >>> stem(torch.ones(1, 3, 8, 8), torch.ones(16, 3, 3, 3), torch.zeros(16, 1, 1), (2, 1, 3, 2, 1), False)[0, 0]
    tensor([[27., 27.],
            [27., 27.]])
    """
    given = images, weight, bias, sizes, channels_last
    made: Tensor
    if has_torch_function_unary(images):  # an fx proxy
        made = handle_torch_function(stem, (images,), *given, min_pixels)
        return made
    if torch.compiler.is_compiling():
        # is_exporting() is always true of what torch 2.11 compiles
        fitting = not (torch.compiler._is_exporting_flag or in_transform()) and fits(*given, min_pixels)
        if fitting and can_trace_launches(images):
            tf32 = noted.tf32 if weight.dtype is torch.float32 else True
            if tf32 is not None:
                return launch_kernels(*given) if tf32 else reference(*given)
        made = torch.ops.replearn.stem.default(*given) if fitting else reference(*given)
        return made
    if runs_eagerly() and fits(*given, min_pixels) and is_precision_of(weight):
        made = torch.ops.replearn.stem.default(*given)
        return made
    return reference(*given)


def reference(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    sizes: tuple[int, ...],
    channels_last: bool = False,
    min_pixels: int = MIN_PIXELS_EAGER,
) -> Tensor:
    stride, padding, window, step, margin = sizes
    made = F.max_pool2d(F.conv2d(images, weight, None, stride, padding), window, step, margin)
    return made.add_(bias).relu_()  # in place: a float32 bias does not widen half precision


def fits(
    images: Tensor,
    weight: Tensor,
    bias: Tensor,
    sizes: tuple[int, ...],
    channels_last: bool,
    min_pixels: int = MIN_PIXELS_EAGER,
) -> bool:
    """True if the kernels compute this call, in the dtypes that `is_precision_of` allows."""
    if images.dim() != 4 or images.numel() < min_pixels * images.shape[1] * sizes[0] ** 2:
        return False
    if not triton_runs_on(images.device) or needs_grad(images, weight, bias):
        return False
    dtype, by, side = weight.dtype, Sizes(*sizes), weight.shape[2]
    high, wide = (by.convolved(length, side) for length in images.shape[2:])
    down, across = by.padded((high, wide), side)
    return (
        images.shape[1] == weight.shape[1]
        and bias.shape == (len(weight), 1, 1)
        and can_tile(weight, sizes)
        and dtype in (torch.float32, *HALF)
        and compute_dtype(images) is dtype
        and images.dtype in (torch.float32, dtype)
        and images.device == weight.device == bias.device
        and min(by.pooled(high), by.pooled(wide)) > 0
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
    yield images.to(dtype), weight, bias, (2, 3, 3, 2, 1), dtype in HALF, 1


def can_tile(weight: Tensor, sizes: tuple[int, ...]) -> bool:
    """True if the kernels' tiles cover this convolution and its pool."""
    channels, colours, side, across = weight.shape
    tiled = colours <= CHANNELS and side == across and 3 <= side <= 16 and channels % 16 == 0
    return tiled and tuple(sizes[2:]) == POOL


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


def can_trace_launches(images: Tensor) -> bool:
    """True if compiled code may launch the kernels itself: on a GPU with TF32."""
    return images.is_cuda and not INTERPRETED and _constant_has_tf32(images.device)


def _constant_has_tf32(device: torch.device) -> bool:
    return has_tf32(device)


# what torch.compiler.assume_constant_result does, which would load the compiler right away
_constant_has_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


@torch.library.impl(_library, "stem", "CUDA")
@torch.library.impl(_library, "stem", "CPU")  # in Triton's interpreter
def _launch(images: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], channels_last: bool) -> Tensor:
    if not is_precision_of(weight):  # in compiled code: the switch may have changed since
        out: Tensor = _fake(images, weight, bias, sizes, channels_last)
        return out.copy_(reference(images, weight, bias, sizes))
    return launch_kernels(images, weight, bias, sizes, channels_last)


def launch_kernels(
    images: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], channels_last: bool
) -> Tensor:
    from ._triton.stem import launch_convolve_and_pool, launch_pad

    out: Tensor = _fake(images, weight, bias, sizes, channels_last)
    by, side = Sizes(*sizes), weight.shape[2]
    high, wide = (by.convolved(length, side) for length in images.shape[2:])
    padded = weight.new_empty(len(images), *by.padded((high, wide), side), CHANNELS)
    packed = weight.new_empty(len(weight), side, power_of_two(side) * CHANNELS)  # in the order of a padded line
    launch_pad(images, weight, padded, packed, by.padding)
    walk = walk_for(len(images), *out.shape[2:])
    launch_convolve_and_pool(padded, packed, bias, out, (high, wide), by.stride, channels_last, walk)
    return out


@torch.library.register_fake("replearn::stem", lib=_library)  # type: ignore[untyped-decorator]
def _fake(images: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], channels_last: bool) -> Tensor:
    by, side = Sizes(*sizes), weight.shape[2]
    down, across = (by.pooled(by.convolved(length, side)) for length in images.shape[2:])
    layout = torch.channels_last if channels_last else torch.contiguous_format
    shape = (images.shape[0], weight.shape[0], down, across)
    return torch.empty(shape, dtype=weight.dtype, device=weight.device, memory_format=layout)


@register_flop_formula(torch.ops.replearn.stem, get_raw=True)
def _flops(
    images: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], channels_last: bool, out_val: Any = None
) -> int:
    high, wide = (Sizes(*sizes).convolved(length, weight.shape[2]) for length in images.shape[2:])
    return 2 * len(images) * high * wide * weight.numel()
