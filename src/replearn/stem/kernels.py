"""The Triton kernels of a stem, and their launches: frame the images, convolve them, pool.

A frame of zeros makes every window whole, and a fourth number beside a pixel's colours makes a line of a window
one run of memory, 7 pixels of it and room for one more: a row of an operand, read 8 or 16 bytes at a time.
A window's lines are as many products, one after another. The weight is brought into the same order beside the
images, and both are rounded to what the products read: tensor cores would cut TF32 off, which leans to zero.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..relaunching import relaunch, starts_even
from .tiles import Tile

jit: Any = triton.jit
COLOURS = 4  # numbers of a framed pixel


@jit
def rounded(x, kind: tl.constexpr):
    # to the nearest number that a product reads; ties go away from zero, and a NaN stays one
    if kind == tl.float32:
        wide = x.to(tl.float32)
        nearest = ((wide.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        made = tl.where(wide == wide, nearest, wide)
    else:
        made = x.to(kind)
    return made


@jit
def frame(
    images, out, program, pixels, down, across, height, width, margin,
    image_stride, channel_stride, y_stride, x_stride, CHANNELS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = out.dtype.element_ty
    place = program * PIXELS + tl.arange(0, PIXELS)
    x = place % across - margin
    y = place // across % down - margin
    seen = (place < pixels) & (x >= 0) & (x < width) & (y >= 0) & (y < height)
    pixel = images + place // (across * down) * image_stride + y * y_stride + x * x_stride
    zero = tl.zeros((PIXELS,), kind)
    one, two, three, four = zero, zero, zero, zero
    one = rounded(tl.load(pixel, mask=seen, other=0.0), kind)
    if CHANNELS > 1:
        two = rounded(tl.load(pixel + channel_stride, mask=seen, other=0.0), kind)
    if CHANNELS > 2:
        three = rounded(tl.load(pixel + 2 * channel_stride, mask=seen, other=0.0), kind)
    if CHANNELS > 3:
        four = rounded(tl.load(pixel + 3 * channel_stride, mask=seen, other=0.0), kind)
    # side by side in memory, and so in a thread
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
def frame_kernel(
    images, framed, pixels, down, across, height, width, margin,
    image_stride, channel_stride, y_stride, x_stride,
    weight, packed, numbers, weight_stride, colour_stride, line_stride, column_stride,
    CHANNELS: tl.constexpr, SIDE: tl.constexpr, RUN: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    last = tl.cdiv(pixels, PIXELS)
    if program < last:
        frame(
            images, framed, program, pixels, down, across, height, width, margin,
            image_stride, channel_stride, y_stride, x_stride, CHANNELS, PIXELS,
        )  # fmt: skip
    else:
        pack(
            weight, packed, program - last, numbers, weight_stride, colour_stride, line_stride, column_stride,
            CHANNELS, SIDE, RUN, PIXELS,
        )  # fmt: skip


@jit
def tile_at(program, channels, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # the rows and columns that a program makes; its neighbours take the same rows
    tiles = channels // COLUMNS
    row = (program // tiles) * ROWS + tl.arange(0, ROWS)
    column = (program % tiles) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column


@jit(do_not_specialize=["rows"])
def convolve_kernel(
    framed, weight, out, rows, down, across, high, wide, channels,
    SIDE: tl.constexpr, RUN: tl.constexpr, STRIDE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tile_at(tl.program_id(0), channels, ROWS, COLUMNS)
    k = tl.arange(0, RUN)
    known = (row[:, None] < rows) & (k[None, :] < 4 * SIDE)  # not pixels that fill up: 0 times inf is no number
    line = (row // (wide * high)) * down + (row // wide % high) * STRIDE
    left = framed + (line * (4 * across) + row % wide * (4 * STRIDE))[:, None] + k[None, :]
    right = weight + column[None, :] * (SIDE * RUN) + k[:, None]
    made = tl.zeros((ROWS, COLUMNS), tl.float32)
    for number in range(SIDE):
        seen = tl.load(left + number * (4 * across), mask=known, other=0.0)
        made = tl.dot(seen, tl.load(right + number * RUN), made, input_precision=PRECISION)
    tl.store(
        out + row[:, None] * channels + column[None, :], made.to(out.dtype.element_ty), mask=row[:, None] < rows
    )


@jit(do_not_specialize=["rows"])
def pool_kernel(
    x, bias, out, rows, high, wide, down, across, channels,
    WINDOW: tl.constexpr, STEP: tl.constexpr, MARGIN: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tile_at(tl.program_id(0), channels, ROWS, COLUMNS)
    known = row < rows
    area = down * across
    left = row % across * STEP - MARGIN
    top = row // across % down * STEP - MARGIN
    image = row // area
    best = tl.full((ROWS, COLUMNS), -float("inf"), tl.float32)
    for dy in tl.static_range(WINDOW):
        for dx in tl.static_range(WINDOW):
            y = top + dy
            seen = known & (y >= 0) & (y < high) & (left + dx >= 0) & (left + dx < wide)
            at = ((image * high + y) * wide + left + dx)[:, None] * channels + column[None, :]
            value = tl.load(x + at, mask=seen[:, None], other=-float("inf")).to(tl.float32)
            best = tl.where((value > best) | (value != value), value, best)  # a NaN stays
    made = best + tl.load(bias + column).to(tl.float32)[None, :]
    made = tl.where(made < 0, 0.0, made).to(out.dtype.element_ty)
    if LAST:
        to = row[:, None] * channels + column[None, :]
    else:
        to = (image * channels * area + row % area)[:, None] + column[None, :] * area
    tl.store(out + to, made, mask=known[:, None])


def launch_frame(images: Tensor, weight: Tensor, framed: Tensor, packed: Tensor, margin: int) -> None:
    """Images in a frame of zeros, `margin` wide above and on the left, and the weight in the order of their lines.

    `framed` is (images, down, across, 4), `packed` (channels, side, run).
    """
    pixels, numbers = framed.numel() // COLOURS, packed.numel()
    programs = -(-pixels // 256) + -(-numbers // 256)
    sizes = (*framed.shape[1:3], *images.shape[2:], margin, *images.stride())
    others = (*weight.stride(), *weight.shape[1:3], packed.shape[2], 256)
    kind = (images.dtype, weight.dtype, framed.dtype, sizes, others, starts_even(images), starts_even(weight))
    given = (images, framed, pixels, *sizes, weight, packed, numbers, *others)
    relaunch(frame_kernel, programs, images, kind, given, num_warps=4)


def launch_convolve(framed: Tensor, weight: Tensor, out: Tensor, stride: int, tile: Tile) -> None:
    """The convolution of framed images; `out` is (images, high, wide, channels)."""
    channels, side, run = weight.shape
    rows, columns = out.numel() // channels, columns_of(channels)
    programs = -(-rows // tile.rows) * (channels // columns)
    precision = "tf32" if weight.element_size() == 4 else "ieee"
    others = (*framed.shape[1:3], *out.shape[1:], side, run, stride, precision, tile.rows, columns)
    given = (framed, weight, out, rows, *others)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    relaunch(convolve_kernel, programs, framed, (framed.dtype, tile, others), given, **options)


def launch_pool(
    x: Tensor, bias: Tensor, out: Tensor, window: int, step: int, margin: int, last: bool, tile: Tile
) -> None:
    """relu(maxpool(x) + bias) of (images, high, wide, channels); `out` is such an image by torch's shape."""
    channels, down, across = out.shape[1:]
    rows, columns = out.numel() // channels, columns_of(channels)
    programs = -(-rows // tile.rows) * (channels // columns)
    others = (*x.shape[1:3], down, across, channels, window, step, margin, last, tile.rows, columns)
    kind = (x.dtype, bias.dtype, tile, others, starts_even(bias))
    relaunch(pool_kernel, programs, x, kind, (x, bias, out, rows, *others), num_warps=tile.num_warps)


def columns_of(channels: int) -> int:
    return next(columns for columns in (64, 32, 16) if channels % columns == 0)
