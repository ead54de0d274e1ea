"""Triton kernels of the weight gradient of conv3x3_small.

Each worker accumulates a part of x and dy in float32; `sum_kernel` adds the partial sums in a fixed order. L2
traffic is the limit: `weight_kernel` reads x and dy three times, `rolling_weight_kernel`, which takes rows in
steps and pixels in pairs, reads x twice and dy little more than once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import device_guard
from .conv3x3_small import group_of, side_of
from .conv3x3_small_tiles import WeightTile

jit: Any = triton.jit


@jit
def weight_kernel(
    x, grad, partials, images, height, width, strip, strips, work,
    CIN: tl.constexpr, COUT: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
    PIXELS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A worker's sum of the weight's gradient: [3 columns x CIN, 3 rows x COUT], or one of the rows with SPLIT."""
    worker = tl.program_id(0)
    k = tl.arange(0, WIDE)[None, :]
    n = tl.arange(0, SIDE)[None, :]
    if SPLIT:
        tap_row = tl.program_id(1) + n * 0
        channel = n
    else:
        tap_row = n // COUT
        channel = n % COUT
    total = tl.zeros([WIDE, SIDE], tl.float32)
    for item in range(worker, work, tl.num_programs(0)):
        tile = item // strips
        first = (item - tile * strips) * strip
        last = tl.minimum(first + strip, height)
        place = (tile * PIXELS + tl.arange(0, PIXELS))[:, None]
        image = place // width
        column = place - image * width
        inside = place < images * width
        pixel = image * height * width + column
        seen = column - 1 + k // CIN
        known = inside & (seen >= 0) & (seen < width) & (k < 3 * CIN)
        used = inside & (tap_row < 3)
        for row in range(first, last):
            left = tl.load(x + (pixel + row * width - 1) * CIN + k, mask=known, other=0.0)
            there = row + 1 - tap_row
            right = tl.load(
                grad + (pixel + there * width) * COUT + channel,
                mask=used & (there >= 0) & (there < height), other=0.0,
            )  # fmt: skip
            total = tl.dot(tl.trans(left), right, total)
    k_down = tl.arange(0, WIDE)[:, None]
    to = ((worker * COUT + channel) * 3 + tap_row) * (3 * CIN) + k_down
    tl.store(partials + to, total, mask=(k_down < 3 * CIN) & (tap_row < 3))


@jit
def grad_row(grad, at, row, height, stride, used):
    return tl.load(grad + at + row * stride, mask=used & (row >= 0) & (row < height), other=0.0)


@jit
def fold(total, CIN: tl.constexpr, COUT: tl.constexpr, WIDE: tl.constexpr):
    """The sum over both pixels of a pair; the second one's window begins a pixel later."""
    first, second = tl.split(tl.permute(tl.reshape(total, [WIDE, 2, COUT]), (0, 2, 1)))
    later = tl.zeros([WIDE, COUT], tl.int32) + (tl.arange(0, WIDE)[:, None] + CIN) % WIDE
    return first + tl.gather(second, later, 0)


@jit
def rolling_weight_kernel(
    x, grad, partials, images, height, width, strip, strips, work,
    CIN: tl.constexpr, COUT: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
    PIXELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
    """As `weight_kernel`, `ROWS` rows at a time: two more rows of dy are read, or none with CARRY.

    The outer product of a group of dy's pixels with all pixels of x in their windows is accumulated; entries
    outside of a window are dropped at the end.
    """
    LINES: tl.constexpr = PIXELS // GROUP
    worker = tl.program_id(0)
    groups = width // GROUP
    k = tl.arange(0, WIDE)[None, :]
    n = tl.arange(0, SIDE)[None, :]
    top = tl.zeros([WIDE, SIDE], tl.float32)
    middle = tl.zeros([WIDE, SIDE], tl.float32)
    bottom = tl.zeros([WIDE, SIDE], tl.float32)
    for item in range(worker, work, tl.num_programs(0)):
        tile = item // strips
        first = (item - tile * strips) * strip
        last = tl.minimum(first + strip, height)
        place = (tile * LINES + tl.arange(0, LINES))[:, None]
        image = place // groups
        column = (place - image * groups) * GROUP
        used = place < images * groups
        pixel = image * height * width + column
        seen = column - 1 + k // CIN
        known = used & (seen >= 0) & (seen < width)
        if (GROUP + 2) * CIN < WIDE:
            known = known & (k < (GROUP + 2) * CIN)
        if GROUP * COUT < SIDE:
            used = used & (n < GROUP * COUT)
        from_x = (pixel - 1) * CIN + k
        from_grad = pixel * COUT + n
        stride = width * COUT
        if CARRY:
            above = grad_row(grad, from_grad, first - 1, height, stride, used)
            here = grad_row(grad, from_grad, first, height, stride, used)
        for row in range(first, last, ROWS):
            if not CARRY:
                above = grad_row(grad, from_grad, row - 1, height, stride, used)
                here = grad_row(grad, from_grad, row, height, stride, used)
            for step in tl.static_range(ROWS):
                at = row + step
                below = grad_row(grad, from_grad, at + 1, height, stride, used)
                left = tl.trans(tl.load(x + from_x + at * (width * CIN), mask=known & (at < last), other=0.0))
                top = tl.dot(left, below, top)
                middle = tl.dot(left, here, middle)
                bottom = tl.dot(left, above, bottom)
                above = here
                here = below
    if GROUP == 2:
        top = fold(top, CIN, COUT, WIDE)
        middle = fold(middle, CIN, COUT, WIDE)
        bottom = fold(bottom, CIN, COUT, WIDE)
    down = tl.arange(0, WIDE)[:, None]
    to = (worker * COUT + tl.arange(0, COUT)[None, :]) * (9 * CIN) + down
    tl.store(partials + to, top, mask=down < 3 * CIN)
    tl.store(partials + to + 3 * CIN, middle, mask=down < 3 * CIN)
    tl.store(partials + to + 6 * CIN, bottom, mask=down < 3 * CIN)


@jit
def sum_kernel(partials, out, count, numbers, LINES: tl.constexpr, COLS: tl.constexpr):
    column = (tl.program_id(0) * COLS + tl.arange(0, COLS))[None, :]
    total = tl.zeros([LINES, COLS], tl.float32)
    for start in range(0, count, LINES):
        line = start + tl.arange(0, LINES)[:, None]
        mask = (line < count) & (column < numbers)
        total += tl.load(partials + line * numbers + column, mask=mask, other=0.0)
    at = tl.program_id(0) * COLS + tl.arange(0, COLS)
    tl.store(out + at, tl.sum(total, 0), mask=at < numbers)


def launch_weight(x: Tensor, grad: Tensor, tile: WeightTile) -> Tensor:
    """Partial sums, (workers, out, 3, 3, in) in float32."""
    images, cin, height, width = x.shape
    cout = grad.shape[1]
    strips = triton.cdiv(height, tile.strip)
    work = triton.cdiv(images * width, tile.pixels) * strips
    workers = min(work, tile.workers)
    group = group_of(width) if tile.roll else 1
    partials = torch.empty((workers, cout, 3, 3, cin), dtype=torch.float32, device=x.device)
    given = (x, grad, partials, images, height, width, tile.strip, strips, work)
    how = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    with device_guard(x.device):
        if tile.roll:
            rolling_weight_kernel[(workers,)](
                *given, CIN=cin, COUT=cout, WIDE=side_of((group + 2) * cin), SIDE=side_of(group * cout),
                PIXELS=tile.pixels, GROUP=group, ROWS=tile.roll, CARRY=tile.carry, **how,
            )  # fmt: skip
        else:
            weight_kernel[(workers, 3 if tile.split else 1)](
                *given, CIN=cin, COUT=cout, WIDE=side_of(3 * cin),
                SIDE=side_of(cout if tile.split else 3 * cout), PIXELS=tile.pixels, SPLIT=tile.split, **how,
            )  # fmt: skip
    return partials


def launch_sum(partials: Tensor) -> Tensor:
    """The sum over workers, in a fixed order."""
    workers = partials.shape[0]
    if workers == 1:
        return partials[0]
    out = torch.empty(partials.shape[1:], dtype=torch.float32, device=partials.device)
    numbers = out.numel()
    with device_guard(partials.device):
        sum_kernel[(triton.cdiv(numbers, 32),)](
            partials, out, workers, numbers, LINES=min(128, side_of(workers)), COLS=32, num_warps=8
        )
    return out
