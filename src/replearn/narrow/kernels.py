"""The Triton kernels of narrow 3x3 convolutions on NHWC tensors, and their launches.

A program takes `PIXELS` neighbouring columns (of one or several images) and walks down their rows. The 3x3 window
is taken apart: its rows come from the walk, so that each row of x is read once for the three rows of the result
that it takes part in; its columns are three reads that differ by one pixel. In NHWC three neighbouring pixels are
one run of memory, so `PACK` reads them at once, as one operand of 3 C numbers (filled up to a power of two).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import Tile, WeightTile

jit: Any = triton.jit
_NOTHING: AbstractContextManager[Any] = nullcontext()


@jit
def window_row(
    weight, row, part, K: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr, COLS: tl.constexpr,
    SPAN: tl.constexpr, GROUP: tl.constexpr, FLIP: tl.constexpr, kind,
):  # fmt: skip
    """One row of the window as a matrix: `SPAN` pixels from column `part` on, to `GROUP` pixels of the result."""
    k = tl.arange(0, SIDE)[:, None]
    n = tl.arange(0, COLS)[None, :]
    column = part + k // K - n // N  # a pixel of the result sees three of x, each by a weight of its own
    tap = 3 * row + column
    if FLIP:  # noqa: SIM108  the gradient of the input: turned by 180 degrees, and what went in comes out
        at = (k % K) * (9 * N) + (8 - tap) * N + n % N
    else:
        at = (n % N) * (9 * K) + tap * K + k % K
    known = (column >= 0) & (column < 3) & (k < SPAN * K) & (n < GROUP * N)
    return tl.load(weight + at, mask=known, other=0.0).to(kind)


@jit
def convolve_kernel(
    x, weight, out, images, height, width, strip,
    K: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr, COLS: tl.constexpr, FLIP: tl.constexpr,
    PIXELS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x.dtype.element_ty
    SPAN: tl.constexpr = 1 if PARTS == 3 else GROUP + 2
    LINES: tl.constexpr = PIXELS // GROUP
    first = tl.program_id(1) * strip
    last = tl.minimum(first + strip, height)
    groups = width // GROUP
    place = tl.program_id(0) * LINES + tl.arange(0, LINES)
    image = place // groups
    column = (place - image * groups) * GROUP
    inside = place < images * groups
    pixel = image * height * width + column
    k = tl.arange(0, SIDE)
    n = tl.arange(0, COLS)
    if PARTS == 3:
        window = (
            window_row(weight, 0, 0, K, N, SIDE, COLS, 1, 1, FLIP, kind),
            window_row(weight, 0, 1, K, N, SIDE, COLS, 1, 1, FLIP, kind),
            window_row(weight, 0, 2, K, N, SIDE, COLS, 1, 1, FLIP, kind),
            window_row(weight, 1, 0, K, N, SIDE, COLS, 1, 1, FLIP, kind),
            window_row(weight, 1, 1, K, N, SIDE, COLS, 1, 1, FLIP, kind),
            window_row(weight, 1, 2, K, N, SIDE, COLS, 1, 1, FLIP, kind),
            window_row(weight, 2, 0, K, N, SIDE, COLS, 1, 1, FLIP, kind),
            window_row(weight, 2, 1, K, N, SIDE, COLS, 1, 1, FLIP, kind),
            window_row(weight, 2, 2, K, N, SIDE, COLS, 1, 1, FLIP, kind),
        )
    else:
        window = (
            window_row(weight, 0, 0, K, N, SIDE, COLS, SPAN, GROUP, FLIP, kind),
            window_row(weight, 1, 0, K, N, SIDE, COLS, SPAN, GROUP, FLIP, kind),
            window_row(weight, 2, 0, K, N, SIDE, COLS, SPAN, GROUP, FLIP, kind),
        )
    above = tl.zeros([LINES, COLS], tl.float32)
    here = tl.zeros([LINES, COLS], tl.float32)
    below = tl.zeros([LINES, COLS], tl.float32)
    for row in range(first - 1, last + 1):
        for part in tl.static_range(PARTS):
            seen = column[:, None] + (part - 1) + k[None, :] // K
            mask = inside[:, None] & (seen >= 0) & (seen < width) & (row >= 0) & (row < height)
            if SPAN * K < SIDE:
                mask = mask & (k[None, :] < SPAN * K)
            at = (pixel + row * width + (part - 1))[:, None] * K + k[None, :]
            tile = tl.load(x + at, mask=mask, other=0.0)
            above = tl.dot(tile, window[2 * PARTS + part], above)
            here = tl.dot(tile, window[PARTS + part], here)
            below = tl.dot(tile, window[part], below)
        to = (pixel + (row - 1) * width)[:, None] * N + n[None, :]
        tl.store(out + to, above.to(kind), mask=inside[:, None] & (row > first) & (n[None, :] < GROUP * N))
        above = here
        here = below
        below = tl.zeros([LINES, COLS], tl.float32)


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
    """The sum of what both pixels of a pair found: the second one's window begins a pixel later."""
    first, second = tl.split(tl.permute(tl.reshape(total, [WIDE, 2, COUT]), (0, 2, 1)))
    later = tl.zeros([WIDE, COUT], tl.int32) + (tl.arange(0, WIDE)[:, None] + CIN) % WIDE
    return first + tl.gather(second, later, 0)


@jit
def rolling_weight_kernel(
    x, grad, partials, images, height, width, strip, strips, work,
    CIN: tl.constexpr, COUT: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
    PIXELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
    """The same with `ROWS` rows at a time, so that of dy two more are read, or none if they are carried along.

    Pixels are taken in groups: products of a group of dy with all pixels of x that it sees are summed, and those
    of pixels that no window has in common are left out at the end.
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


def launch_convolve(x: Tensor, weight: Tensor, out: Tensor, flip: bool, tile: Tile) -> None:
    images, k, height, width = x.shape
    n = out.shape[1]
    group = group_of(width) if tile.pack else 1
    grid = (triton.cdiv(images * width, tile.pixels), triton.cdiv(height, tile.strip))
    with on_device_of(x):
        convolve_kernel[grid](
            x, weight, out, images, height, width, tile.strip,
            K=k, N=n, SIDE=side_of((group + 2) * k if tile.pack else k), COLS=side_of(group * n), FLIP=flip,
            PIXELS=tile.pixels, GROUP=group, PARTS=1 if tile.pack else 3,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip


def launch_weight(x: Tensor, grad: Tensor, tile: WeightTile) -> Tensor:
    """Each worker's sum, as (worker, out, 3, 3, in) in float32."""
    images, cin, height, width = x.shape
    cout = grad.shape[1]
    strips = triton.cdiv(height, tile.strip)
    work = triton.cdiv(images * width, tile.pixels) * strips
    workers = min(work, tile.workers)
    group = group_of(width) if tile.roll else 1
    partials = torch.empty((workers, cout, 3, 3, cin), dtype=torch.float32, device=x.device)
    given = (x, grad, partials, images, height, width, tile.strip, strips, work)
    how = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    with on_device_of(x):
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
    """The sum over workers, always in the same order."""
    out = torch.empty(partials.shape[1:], dtype=torch.float32, device=partials.device)
    numbers = out.numel()
    with on_device_of(partials):
        sum_kernel[(triton.cdiv(numbers, 16),)](
            partials, out, partials.shape[0], numbers, LINES=256, COLS=16, num_warps=8
        )
    return out


def group_of(width: int) -> int:
    """How many neighbouring pixels are one line of an operand: a pair sees four of x, a power of two."""
    return 2 if width % 2 == 0 else 1


def side_of(numbers: int) -> int:
    """The side of an operand that holds them: a power of two, and no product takes less than 16."""
    return max(16, triton.next_power_of_2(numbers))


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda and torch.cuda.device_count() > 1 else _NOTHING
