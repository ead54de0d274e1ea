"""Triton kernels of small 3x3 convolutions on NHWC tensors, and of their weight gradients.

A program takes `PIXELS` neighbouring columns (of one or several images) and walks down their rows. The 3x3 window
is taken apart: its rows come from the walk, so that each row of x is read once for the three rows of the result
that it takes part in. Its columns are `PARTS` reads: three that differ by one pixel, or a single one for a `GROUP`
of two pixels of the result. In NHWC the four pixels that these see are one run of memory, and so one operand.

For the weight gradient each worker accumulates a part of x and dy in float32, and `sum_kernel` adds the partial
sums in a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import launch

if TYPE_CHECKING:
    from ..conv3x3_small import Tile, WeightTile

jit: Any = triton.jit


@jit
def window_row(
    weight, row, part, K: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr, COLS: tl.constexpr,
    SPAN: tl.constexpr, GROUP: tl.constexpr, FLIP: tl.constexpr, DTYPE,
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
    return tl.load(weight + at, mask=known, other=0.0).to(DTYPE)


@jit
def convolve_kernel(
    x, weight, out, images, height, width, strip,
    K: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr, COLS: tl.constexpr, FLIP: tl.constexpr,
    PIXELS: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x.dtype.element_ty
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
            window_row(weight, 0, 0, K, N, SIDE, COLS, 1, 1, FLIP, DTYPE),
            window_row(weight, 0, 1, K, N, SIDE, COLS, 1, 1, FLIP, DTYPE),
            window_row(weight, 0, 2, K, N, SIDE, COLS, 1, 1, FLIP, DTYPE),
            window_row(weight, 1, 0, K, N, SIDE, COLS, 1, 1, FLIP, DTYPE),
            window_row(weight, 1, 1, K, N, SIDE, COLS, 1, 1, FLIP, DTYPE),
            window_row(weight, 1, 2, K, N, SIDE, COLS, 1, 1, FLIP, DTYPE),
            window_row(weight, 2, 0, K, N, SIDE, COLS, 1, 1, FLIP, DTYPE),
            window_row(weight, 2, 1, K, N, SIDE, COLS, 1, 1, FLIP, DTYPE),
            window_row(weight, 2, 2, K, N, SIDE, COLS, 1, 1, FLIP, DTYPE),
        )
    else:
        window = (  # type: ignore[assignment]
            window_row(weight, 0, 0, K, N, SIDE, COLS, SPAN, GROUP, FLIP, DTYPE),
            window_row(weight, 1, 0, K, N, SIDE, COLS, SPAN, GROUP, FLIP, DTYPE),
            window_row(weight, 2, 0, K, N, SIDE, COLS, SPAN, GROUP, FLIP, DTYPE),
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
        tl.store(out + to, above.to(DTYPE), mask=inside[:, None] & (row > first) & (n[None, :] < GROUP * N))
        above = here
        here = below
        below = tl.zeros([LINES, COLS], tl.float32)


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
def weight_kernel(
    x, grad, partials, images, height, width, strip, strips, work,
    CIN: tl.constexpr, COUT: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr,
    PIXELS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
    """A worker's sum of the weight's gradient, `ROWS` rows at a time; with CARRY no row of dy is read twice.

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


def launch_convolve(x: Tensor, weight: Tensor, out: Tensor, flip: bool, tile: Tile) -> None:
    images, k, height, width = x.shape
    n = out.shape[1]
    group = group_of(width) if tile.pack else 1
    grid = (triton.cdiv(images * width, tile.pixels), triton.cdiv(height, tile.strip))
    launch(
        convolve_kernel, grid, x, x, weight, out, images, height, width, tile.strip,
        K=k, N=n, SIDE=side_of((group + 2) * k if tile.pack else k), COLS=side_of(group * n), FLIP=flip,
        PIXELS=tile.pixels, GROUP=group, PARTS=1 if tile.pack else 3,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def launch_weight(x: Tensor, grad: Tensor, tile: WeightTile) -> Tensor:
    """Partial sums, (workers, out, 3, 3, in) in float32."""
    images, cin, height, width = x.shape
    cout, group = grad.shape[1], group_of(width)
    strips = triton.cdiv(height, tile.strip)
    work = triton.cdiv(images * width, tile.pixels) * strips
    workers = min(work, tile.workers)
    partials = torch.empty((workers, cout, 3, 3, cin), dtype=torch.float32, device=x.device)
    launch(
        weight_kernel, workers, x, x, grad, partials, images, height, width, tile.strip, strips, work,
        CIN=cin, COUT=cout, WIDE=side_of((group + 2) * cin), SIDE=side_of(group * cout),
        PIXELS=tile.pixels, GROUP=group, ROWS=tile.roll, CARRY=tile.carry,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return partials


def launch_sum(partials: Tensor) -> Tensor:
    """The sum over workers, in a fixed order."""
    workers = partials.shape[0]
    if workers == 1:
        return partials[0]
    out = torch.empty(partials.shape[1:], dtype=torch.float32, device=partials.device)
    numbers = out.numel()
    sizes: dict[str, int] = {"LINES": min(128, side_of(workers)), "COLS": 32}
    launch(sum_kernel, triton.cdiv(numbers, 32), partials, partials, out, workers, numbers, **sizes, num_warps=8)
    return out


def group_of(width: int) -> int:
    """Neighbouring pixels per row of an operand: the windows of a pair span four pixels, a power of two."""
    return 2 if width % 2 == 0 else 1


def side_of(numbers: int) -> int:
    """Rounded up to a size of tl.dot: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(numbers)))
