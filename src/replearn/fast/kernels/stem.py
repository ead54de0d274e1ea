"""A stem as a torch operation: what it computes, shapes alone, and which tensors fit.

    y = relu(maxpool(W * images) + b)

as a flat graph has a ResNet's first layers. torch rounds the images, convolves them (cuDNN's kernels are made for
more channels than colours are), pools and notes where each maximum lay, adds the bias, and takes the ReLU. Our
kernels are for half precision, and for float32 where its convolutions are in TF32.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.flop_counter import register_flop_formula

from ...costs.precision import convolves_in_tf32, noted
from ..graphs.launch_cache import Launch
from ..graphs.repeating import Run, first_run, kind_of, known_run, remember
from ._transforms import transformed
from ._triton.stem_tiles import CONVOLVING, LEAST, POOLING, WALKING
from .conv3x3_small import INTERPRETED, computed_dtype, kernels_run_on
from .linear_residual import may_launch, wants_gradient
from .patch_embed import reach

COLOURS = 4  # numbers of a framed pixel
WINDOW = 4  # of a pool, at most: the kernel has its places written out, and a wide one would compile for minutes
# Pixels of a convolution's result from which on three launches pay, 42 images of 224 x 224: Python takes longer
# for them than for torch's operations, and with fewer images it is Python that a network waits for. In a CUDA
# graph it takes no time, in compiled code little, and three images are enough.
MANY, FEW = 2**19, 2**15
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_library = torch.library.Library("replearn", "FRAGMENT")  # keeps the operation registered
_library.define("stem(Tensor images, Tensor weight, Tensor bias, int[] sizes, bool last) -> Tensor")


class Sizes(NamedTuple):
    """Strides and zeros around, of the convolution and of the pool, which all are the same in both directions."""

    stride: int
    padding: int
    window: int
    step: int
    margin: int

    def convolved(self, length: int, side: int) -> int:
        return (length + 2 * self.padding - side) // self.stride + 1

    def pooled(self, length: int) -> int:
        return (length + 2 * self.margin - self.window) // self.step + 1


def stem(
    images: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], last: bool, many: int = MANY
) -> Tensor:
    """relu(maxpool(conv(images, weight)) + bias), in channels_last order if `last`: by our kernels, or by torch.

    The bias is (channels, 1, 1). The kernels know no gradients: where one is wanted, or a program is exported,
    torch computes the same. So it does where the convolution makes fewer than `many` pixels, and launches cost
    more than arithmetic. A compiler launches the kernels itself, which takes Python less time, in half precision
    and where TF32 is `noted`; elsewhere compiled code calls the operation, which asks for TF32 when it runs.

    >>> stem(torch.ones(1, 3, 8, 8), torch.ones(16, 3, 3, 3), torch.zeros(16, 1, 1), (2, 1, 3, 2, 1), False)[0, 0]
    tensor([[27., 27.],
            [27., 27.]])
    """
    given = images, weight, bias, sizes, last
    made: Tensor
    if has_torch_function_unary(images):  # as in residual_linear
        made = handle_torch_function(stem, (images,), *given, many)
        return made
    if torch.compiler.is_compiling():
        # not is_exporting(), which is always true of what torch 2.11 compiles
        taken = not (torch.compiler._is_exporting_flag or transformed()) and fits(*given, many)
        if taken and can_be_traced(images):
            in_tf32 = noted.tf32 if weight.dtype is torch.float32 else True
            if in_tf32 is not None:
                return launched(*given)[0] if in_tf32 else usual(*given)
        made = torch.ops.replearn.stem.default(*given) if taken else usual(*given)
        return made
    if are_few(images, sizes, many) or not may_launch() or not in_these_numbers(weight):
        return usual(*given)
    kind = kind_of("stem", (images, weight, bias), *sizes, last, many, computed_dtype(images))
    if (run := known_run(kind)) is not None:
        return run(images, weight, bias)
    if not fits(*given, many):
        return remember(kind, partial(usual, sizes=sizes, last=last))(images, weight, bias)
    return first_run(kind, launched, torch.ops.replearn.stem.default, given)


def usual(images: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], last: bool) -> Tensor:
    stride, padding, window, step, margin = sizes
    made = F.max_pool2d(F.conv2d(images, weight, None, stride, padding), window, step, margin)
    return made.add_(bias).relu_()  # in place: a bias in float32 does not widen half precision


def span(side: int) -> int:
    """How many pixels of a line are read: a power of two."""
    return 1 << (side - 1).bit_length()


def fits(
    images: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], last: bool, many: int = MANY
) -> bool:
    """Whether our kernels compute this, here and now."""
    if are_few(images, sizes, many) or not kernels_run_on(images.device) or wants_gradient(images, weight, bias):
        return False
    kind, by, side = weight.dtype, Sizes(*sizes), weight.shape[2]
    high, wide = (by.convolved(length, side) for length in images.shape[2:])
    pixels = len(images) * high * wide
    framed = len(images) * frame_of(high, by, side) * across_of(wide, by, side) * COLOURS
    return (
        images.shape[1] == weight.shape[1]
        and bias.shape == (len(weight), 1, 1)
        and can_be_cut(weight)
        and by.window <= WINDOW
        and kind in _DTYPES
        and computed_dtype(images) is kind
        and images.dtype in (torch.float32, kind)
        and images.device == weight.device == bias.device
        and min(by.pooled(high), by.pooled(wide)) > 0
        # offsets are 32-bit numbers
        and max(framed, pixels * len(weight), reach(images), reach(weight)) < 2**31
        and bias.is_contiguous()
        and 0 not in images.stride()  # what is expanded may be larger than its memory: nothing to gain
    )


def are_few(images: Tensor, sizes: tuple[int, ...], many: int) -> bool:
    """Whether they make fewer than `many` pixels, or are no images. Asked first and often, so it is short."""
    return images.dim() != 4 or images.numel() < many * images.shape[1] * sizes[0] ** 2


def in_these_numbers(weight: Tensor) -> bool:
    """Whether torch rounds float32 to TF32 on its way into a convolution there, as the kernels do."""
    if weight.dtype is not torch.float32:
        return True
    return convolves_in_tf32() and torch.backends.cudnn.enabled and has_tf32(weight.device)


@cache
def has_tf32(device: torch.device) -> bool:
    """Whether cuDNN has TF32 there; in Triton's interpreter, and on a GPU that is made up, it is as if."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def can_be_cut(weight: Tensor) -> bool:
    """Whether tiles of our kernels cover this convolution of images."""
    channels, colours, side, across = weight.shape
    return colours <= COLOURS and side == across and 3 <= side <= 16 and channels % 16 == 0


def frame_of(high: int, by: Sizes, side: int) -> int:
    """How many lines of a framed image all windows take."""
    return (high - 1) * by.stride + side


def across_of(wide: int, by: Sizes, side: int) -> int:
    """How many pixels of such a line, up to a multiple of 16, so that each begins where 16 bytes do."""
    return -(-((wide - 1) * by.stride + span(side)) // 16) * 16


def can_be_traced(images: Tensor) -> bool:
    """Whether a compiler can launch the kernels itself, in less of Python's time: not in Triton's interpreter.

    Nor on GPUs without TF32, which no switch tells of; the operation asks for that, too.
    """
    return images.is_cuda and not INTERPRETED and tf32_is_there(images.device)


def tf32_is_there(device: torch.device) -> bool:
    return has_tf32(device)


# it never changes; as torch.compiler.assume_constant_result says so, which would load the compiler right away
tf32_is_there._dynamo_marked_constant = True  # type: ignore[attr-defined]


@torch.library.impl(_library, "stem", "CUDA")
@torch.library.impl(_library, "stem", "CPU")  # in Triton's interpreter, for tests
def compute(images: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], last: bool) -> Tensor:
    if not in_these_numbers(weight):  # in code that was compiled before this was asked for
        out: Tensor = empty_result(images, weight, bias, sizes, last)
        return out.copy_(usual(images, weight, bias, sizes, last))
    return launched(images, weight, bias, sizes, last)[0]


def launched(
    images: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], last: bool
) -> tuple[Tensor, Run | None]:
    """By our kernels, whatever the switches say; and what does so with other such tensors, where they are many."""
    from ._triton.stem import launch_convolve, launch_convolve_and_pool, launch_frame, launch_pool

    out: Tensor = empty_result(images, weight, bias, sizes, last)
    by, side = Sizes(*sizes), weight.shape[2]
    high, wide = (by.convolved(length, side) for length in images.shape[2:])
    framed = weight.new_empty(len(images), frame_of(high, by, side), across_of(wide, by, side), COLOURS)
    packed = weight.new_empty(len(weight), side, span(side) * COLOURS)  # in the order of a framed image's lines
    first = launch_frame(images, weight, framed, packed, by.padding)
    if by[2:] == (3, 2, 1) and WALKING.programs(len(images), *out.shape[2:]) >= LEAST:
        then = launch_convolve_and_pool(framed, packed, bias, out, (high, wide), by.stride, last, WALKING)
        return out, None if first is None or then is None else repeated(first, then, framed, packed, out)
    convolved = weight.new_empty(len(images), high, wide, len(weight))
    launch_convolve(framed, packed, convolved, by.stride, CONVOLVING)
    launch_pool(convolved, bias, out, by.window, by.step, by.margin, last, POOLING)
    return out, None


def repeated(first: Launch, then: Launch, framed: Tensor, packed: Tensor, out: Tensor) -> Run:
    """These launches with other tensors, and with room like this."""
    frame, convolve_and_pool = first.again(), then.again()
    room = [
        partial(torch.empty_strided, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        for tensor in (framed, packed, out)
    ]

    def run(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        framed, packed = room[0](), room[1]()
        frame(images, framed, weight, packed)
        out = room[2]()  # not before: the GPU has something to do now
        convolve_and_pool(framed, packed, bias, out)
        return out

    return run


@torch.library.register_fake("replearn::stem", lib=_library)  # type: ignore[untyped-decorator]
def empty_result(images: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], last: bool) -> Tensor:
    by, side = Sizes(*sizes), weight.shape[2]
    down, across = (by.pooled(by.convolved(length, side)) for length in images.shape[2:])
    order = torch.channels_last if last else torch.contiguous_format
    return torch.empty(
        (images.shape[0], weight.shape[0], down, across),
        dtype=weight.dtype,
        device=weight.device,
        memory_format=order,
    )


@register_flop_formula(torch.ops.replearn.stem, get_raw=True)
def flops_of(
    images: Tensor, weight: Tensor, bias: Tensor, sizes: tuple[int, ...], last: bool, out_val: Any = None
) -> int:
    """Two for a multiply and add, as torch counts."""
    high, wide = (Sizes(*sizes).convolved(length, weight.shape[2]) for length in images.shape[2:])
    return 2 * len(images) * high * wide * weight.numel()
