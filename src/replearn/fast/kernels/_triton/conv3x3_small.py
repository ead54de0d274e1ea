"""The Triton kernel of narrow 3x3 convolutions on NHWC tensors, and its launch.

A program takes `PIXELS` neighbouring columns (of one or several images) and walks down their rows. The 3x3 window
is taken apart: its rows come from the walk, so that each row of x is read once for the three rows of the result
that it takes part in. Its columns are `PARTS` reads: three that differ by one pixel, or a single one for a `GROUP`
of two pixels of the result. In NHWC the four pixels that these see are one run of memory, and so one operand.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import device_guard
from .conv3x3_small_tiles import Tile

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


def launch_convolve(x: Tensor, weight: Tensor, out: Tensor, flip: bool, tile: Tile) -> None:
    images, k, height, width = x.shape
    n = out.shape[1]
    group = group_of(width) if tile.pack else 1
    grid = (triton.cdiv(images * width, tile.pixels), triton.cdiv(height, tile.strip))
    with device_guard(x.device):
        convolve_kernel[grid](
            x, weight, out, images, height, width, tile.strip,
            K=k, N=n, SIDE=side_of((group + 2) * k if tile.pack else k), COLS=side_of(group * n), FLIP=flip,
            PIXELS=tile.pixels, GROUP=group, PARTS=1 if tile.pack else 3,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip


def group_of(width: int) -> int:
    """Neighbouring pixels per row of an operand: the windows of a pair span four pixels, a power of two."""
    return 2 if width % 2 == 0 else 1


def side_of(numbers: int) -> int:
    """Rounded up to a size of tl.dot: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(numbers)))
