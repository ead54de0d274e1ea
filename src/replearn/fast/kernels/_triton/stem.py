"""Triton kernels of a stem: pad the images, then convolve and pool.

With zero padding and a fourth channel every line of a window is one run of memory, 7 pixels and room for one more:
a row of an operand, read 8 or 16 bytes at a time. The lines of a window are as many products. The first kernel
also packs the weight in that order, and rounds both to what the products read: tensor cores truncate to TF32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import launch

if TYPE_CHECKING:
    from ..stem import Walk

jit: Any = triton.jit
PADDED_CHANNELS = 4


@jit
def rounded(x, DTYPE: tl.constexpr):
    # to the nearest value that a product reads; ties away from zero, NaN stays NaN
    if tl.float32 == DTYPE:
        wide = x.to(tl.float32)
        nearest = ((wide.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        made = tl.where(wide == wide, nearest, wide)
    else:
        made = x.to(DTYPE)
    return made


@jit
def pad(
    images, out, program, pixels, down, across, height, width, margin,
    image_stride, channel_stride, y_stride, x_stride, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    place = program * PIXELS + tl.arange(0, PIXELS)
    x = place % across - margin
    y = place // across % down - margin
    seen = (place < pixels) & (x >= 0) & (x < width) & (y >= 0) & (y < height)
    pixel = images + place // (across * down) * image_stride + y * y_stride + x * x_stride
    zero = tl.zeros((PIXELS,), DTYPE)
    one, two, three, four = zero, zero, zero, zero
    one = rounded(tl.load(pixel, mask=seen, other=0.0), DTYPE)
    if CHANNELS > 1:
        two = rounded(tl.load(pixel + channel_stride, mask=seen, other=0.0), DTYPE)
    if CHANNELS > 2:
        three = rounded(tl.load(pixel + 2 * channel_stride, mask=seen, other=0.0), DTYPE)
    if CHANNELS > 3:
        four = rounded(tl.load(pixel + 3 * channel_stride, mask=seen, other=0.0), DTYPE)
    # adjacent in memory, and so in a thread
    made = tl.join(tl.join(one, three), tl.join(two, four))
    half = tl.arange(0, 2)
    at = 4 * place[:, None, None] + 2 * half[None, :, None] + half[None, None, :]
    tl.store(out + at, made, mask=place[:, None, None] < pixels)


@jit
def pack(
    weight, out, program, numbers, channel_stride, colour_stride, y_stride, x_stride,
    CHANNELS: tl.constexpr, SIDE: tl.constexpr, RUN: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    number = program * NUMBERS + tl.arange(0, NUMBERS)
    colour = number % 4
    x = number % RUN // 4
    y = number // RUN % SIDE
    seen = (number < numbers) & (colour < CHANNELS) & (x < SIDE)
    at = number // (RUN * SIDE) * channel_stride + colour * colour_stride + y * y_stride + x * x_stride
    made = rounded(tl.load(weight + at, mask=seen, other=0.0), out.dtype.element_ty)
    tl.store(out + number, made, mask=number < numbers)


@jit(do_not_specialize=["pixels", "numbers"])
def pad_kernel(
    images, padded, weight, packed, pixels, down, across, height, width, margin,
    image_stride, channel_stride, y_stride, x_stride,
    numbers, weight_stride, colour_stride, line_stride, column_stride,
    CHANNELS: tl.constexpr, SIDE: tl.constexpr, RUN: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    last = tl.cdiv(pixels, PIXELS)
    if program < last:
        pad(
            images, padded, program, pixels, down, across, height, width, margin,
            image_stride, channel_stride, y_stride, x_stride, CHANNELS, PIXELS,
        )  # fmt: skip
    else:
        pack(
            weight, packed, program - last, numbers, weight_stride, colour_stride, line_stride, column_stride,
            CHANNELS, SIDE, RUN, PIXELS,
        )  # fmt: skip


@jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def convolve_and_pool_kernel(
    padded, weight, bias, out, down, across, high, wide, down_pooled, across_pooled, channels, walks, chunks,
    SIDE: tl.constexpr, RUN: tl.constexpr, STRIDE: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A program walks down an image: a line of the convolution, its maximum over 3 columns, then over 3 lines.

    Lane 0 belongs to the pixel before the first one, which that one's window needs.
    """
    program, tile = tl.program_id(0) // (channels // COLUMNS), tl.program_id(0) % (channels // COLUMNS)
    chunk, walk = program % chunks, program // chunks % walks
    image = program // (chunks * walks)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, LANES)
    k = tl.arange(0, RUN)
    x = 2 * (chunk * (LANES - 1) - 1) + tl.arange(0, 2 * LANES)
    seen = (x >= 0) & (x < wide)
    left = padded + image * (down * across * 4) + tl.where(seen, x, 0)[:, None] * (4 * STRIDE) + k[None, :]
    right = weight + column[None, :] * (SIDE * RUN) + k[:, None]
    known = (k[None, :] < 4 * SIDE) & seen[:, None]  # no padding lanes: 0 times inf is NaN
    shift = tl.load(bias + column).to(tl.float32)[None, :]
    place = chunk * (LANES - 1) - 1 + lane
    before = tl.broadcast_to(tl.maximum(lane - 1, 0)[:, None], (LANES, COLUMNS))
    made = tl.zeros((2 * LANES, COLUMNS), tl.float32)
    best = tl.full((LANES, COLUMNS), -float("inf"), tl.float32)
    for step in range((2 * STEPS + 1) * SIDE):
        number, y = step // SIDE, step % SIDE
        line = 2 * walk * STEPS - 1 + number
        there = (line >= 0) & (line < high)
        at = (tl.where(there, line, 0) * STRIDE + y) * (4 * across)
        pixels = tl.load(left + at, mask=known, other=0.0)
        made = tl.dot(pixels, tl.load(right + y * RUN), made, input_precision=PRECISION)
        if y == SIDE - 1:
            value = tl.where(seen[:, None] & there, made, -float("inf"))
            even, odd = tl.split(tl.permute(tl.reshape(value, (LANES, 2, COLUMNS)), (0, 2, 1)))
            three = larger(larger(even, odd), tl.gather(odd, before, 0))
            best = larger(best, three)
            if (number > 0) & (number % 2 == 0):
                row = walk * STEPS + number // 2 - 1
                result = best + shift
                result = tl.where(result < 0, 0.0, result).to(out.dtype.element_ty)
                inside = (lane > 0) & (place < across_pooled) & (row < down_pooled)
                if LAST:
                    to = ((image * down_pooled + row) * across_pooled + place)[:, None] * channels
                    to += column[None, :]
                else:
                    to = (image * channels * down_pooled + row) * across_pooled + place[:, None]
                    to += column[None, :] * (down_pooled * across_pooled)
                tl.store(out + to, result, mask=inside[:, None])
                best = three
            made = tl.zeros((2 * LANES, COLUMNS), tl.float32)


def launch_pad(images: Tensor, weight: Tensor, padded: Tensor, packed: Tensor, margin: int) -> None:
    """Pad the images with `margin` zeros above and on the left, and pack the weight in the order of their lines.

    `padded` is (images, down, across, 4), `packed` (channels, side, run).
    """
    pixels, weights = padded.numel() // PADDED_CHANNELS, packed.numel()
    programs = -(-pixels // 256) + -(-weights // 256)
    sizes = (*padded.shape[1:3], *images.shape[2:], margin, *images.stride())
    others = (*weight.stride(), *weight.shape[1:3], packed.shape[2], 256)
    given = (images, padded, weight, packed, pixels, *sizes, weights, *others)
    launch(pad_kernel, programs, images, *given, num_warps=4)


def launch_convolve_and_pool(
    padded: Tensor, weight: Tensor, bias: Tensor, out: Tensor, sizes: tuple[int, int], stride: int, last: bool,
    tile: Walk,
) -> None:  # fmt: skip
    """relu(maxpool(conv) + bias) of padded images, with a pool of 3 x 3 pixels and stride 2.

    `sizes` are those of the convolution's result, which is not stored; `out` has torch's shape.
    """
    channels, side, run = weight.shape
    (high, wide), (down_pooled, across_pooled), columns = sizes, out.shape[2:], columns_of(channels)
    walks, chunks = tile.programs(1, down_pooled, 1), tile.programs(1, 1, across_pooled)
    programs = tile.programs(len(out), down_pooled, across_pooled) * (channels // columns)
    cut = (*padded.shape[1:3], high, wide, down_pooled, across_pooled, channels, walks, chunks)
    constants = (side, run, stride, last, precision_of(weight), tile.lanes, columns, tile.steps)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    launch(convolve_and_pool_kernel, programs, padded, padded, weight, bias, out, *cut, *constants, **options)


def precision_of(weight: Tensor) -> str:
    """Triton's input precision of the products."""
    return "tf32" if weight.element_size() == 4 else "ieee"


def columns_of(channels: int) -> int:
    return next(columns for columns in (64, 32, 16) if channels % columns == 0)
