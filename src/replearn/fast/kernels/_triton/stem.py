"""The Triton kernels of a stem, and their launches: frame the images, convolve them and pool, in one or in two.

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

from ...graphs.launch_cache import Launch, relaunch, starts_even
from .stem_tiles import Tile, Walk

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
    images, framed, weight, packed, pixels, down, across, height, width, margin,
    image_stride, channel_stride, y_stride, x_stride,
    numbers, weight_stride, colour_stride, line_stride, column_stride,
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


@jit
def larger(a, b):
    # a NaN stays
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def convolve_and_pool_kernel(
    framed, weight, bias, out, down, across, high, wide, below, beside, channels, walks, chunks,
    SIDE: tl.constexpr, RUN: tl.constexpr, STRIDE: tl.constexpr, LAST: tl.constexpr, PRECISION: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A program walks down an image: a line of the convolution, its largest of three side by side, of three lines.

    Lane 0 is of the pixel before its first, for the one beside that.
    """
    program, tile = tl.program_id(0) // (channels // COLUMNS), tl.program_id(0) % (channels // COLUMNS)
    chunk, walk = program % chunks, program // chunks % walks
    image = program // (chunks * walks)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, LANES)
    k = tl.arange(0, RUN)
    x = 2 * (chunk * (LANES - 1) - 1) + tl.arange(0, 2 * LANES)
    seen = (x >= 0) & (x < wide)
    left = framed + image * (down * across * 4) + tl.where(seen, x, 0)[:, None] * (4 * STRIDE) + k[None, :]
    right = weight + column[None, :] * (SIDE * RUN) + k[:, None]
    known = (k[None, :] < 4 * SIDE) & seen[:, None]  # not pixels that fill up: 0 times inf is no number
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
                inside = (lane > 0) & (place < beside) & (row < below)
                if LAST:
                    to = ((image * below + row) * beside + place)[:, None] * channels + column[None, :]
                else:
                    to = (image * channels * below + row) * beside + place[:, None]
                    to += column[None, :] * (below * beside)
                tl.store(out + to, result, mask=inside[:, None])
                best = three
            made = tl.zeros((2 * LANES, COLUMNS), tl.float32)


def launch_frame(images: Tensor, weight: Tensor, framed: Tensor, packed: Tensor, margin: int) -> Launch | None:
    """Images in a frame of zeros, `margin` wide above and on the left, and the weight in the order of their lines.

    `framed` is (images, down, across, 4), `packed` (channels, side, run).
    """
    pixels, weights = framed.numel() // COLOURS, packed.numel()
    programs = -(-pixels // 256) + -(-weights // 256)
    sizes = (*framed.shape[1:3], *images.shape[2:], margin, *images.stride())
    others = (*weight.stride(), *weight.shape[1:3], packed.shape[2], 256)
    kind = (images.dtype, weight.dtype, framed.dtype, sizes, others, starts_even(images), starts_even(weight))
    tensors, numbers = (images, framed, weight, packed), (pixels, *sizes, weights, *others)
    return relaunch(frame_kernel, programs, images, kind, tensors, numbers, num_warps=4)


def launch_convolve(framed: Tensor, weight: Tensor, out: Tensor, stride: int, tile: Tile) -> None:
    """The convolution of framed images; `out` is (images, high, wide, channels)."""
    channels, side, run = weight.shape
    rows, columns = out.numel() // channels, columns_of(channels)
    programs = -(-rows // tile.rows) * (channels // columns)
    others = (*framed.shape[1:3], *out.shape[1:], side, run, stride, precision_of(weight), tile.rows, columns)
    given = (framed, weight, out, rows, *others)
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    relaunch(convolve_kernel, programs, framed, (framed.dtype, tile, others), given, **options)


def launch_convolve_and_pool(
    framed: Tensor, weight: Tensor, bias: Tensor, out: Tensor, sizes: tuple[int, int], stride: int, last: bool,
    tile: Walk,
) -> Launch | None:  # fmt: skip
    """relu(maxpool(conv) + bias) of framed images, where the pool takes 3 x 3 pixels around every other one.

    `sizes` are those of the convolution's result, which is nowhere stored; `out` is an image by torch's shape.
    """
    channels, side, run = weight.shape
    (high, wide), (below, beside), columns = sizes, out.shape[2:], columns_of(channels)
    walks, chunks = tile.programs(1, below, 1), tile.programs(1, 1, beside)
    programs = tile.programs(len(out), below, beside) * (channels // columns)
    cut = (*framed.shape[1:3], high, wide, below, beside, channels, walks, chunks)
    constants = (side, run, stride, last, precision_of(weight), tile.lanes, columns, tile.steps)
    tensors, numbers = (framed, weight, bias, out), (*cut, *constants)
    kind = (framed.dtype, bias.dtype, tile, cut, constants, starts_even(bias))
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return relaunch(convolve_and_pool_kernel, programs, framed, kind, tensors, numbers, **options)


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


def precision_of(weight: Tensor) -> str:
    """Of the products, as Triton names it; half precision has one alone."""
    return "tf32" if weight.element_size() == 4 else "ieee"


def columns_of(channels: int) -> int:
    return next(columns for columns in (64, 32, 16) if channels % columns == 0)
