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
def window_row(weight, row, part, K: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr, FLIP: tl.constexpr, kind):
    """One row of the window from its column `part` on, as a [SIDE, N] matrix; weights lie as (out, 3, 3, in)."""
    k = tl.arange(0, SIDE)[:, None]
    n = tl.arange(0, N)[None, :]
    tap = 3 * row + part + k // K
    if FLIP:  # noqa: SIM108  the gradient of the input: turned by 180 degrees, and what went in comes out
        at = (k % K) * (9 * N) + (8 - tap) * N + n
    else:
        at = n * (9 * K) + tap * K + k % K
    return tl.load(weight + at, mask=(part + k // K < 3) & (n < N), other=0.0).to(kind)


@jit
def convolve_kernel(
    x, weight, out, images, height, width, strip,
    K: tl.constexpr, N: tl.constexpr, SIDE: tl.constexpr, FLIP: tl.constexpr,
    PIXELS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    kind: tl.constexpr = x.dtype.element_ty
    PARTS: tl.constexpr = 1 if PACK else 3
    first = tl.program_id(1) * strip
    last = tl.minimum(first + strip, height)
    place = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    image = place // width
    column = place - image * width
    inside = place < images * width
    pixel = image * height * width + column
    k = tl.arange(0, SIDE)
    n = tl.arange(0, N)
    window = (
        window_row(weight, 0, 0, K, N, SIDE, FLIP, kind), window_row(weight, 0, 1, K, N, SIDE, FLIP, kind),
        window_row(weight, 0, 2, K, N, SIDE, FLIP, kind), window_row(weight, 1, 0, K, N, SIDE, FLIP, kind),
        window_row(weight, 1, 1, K, N, SIDE, FLIP, kind), window_row(weight, 1, 2, K, N, SIDE, FLIP, kind),
        window_row(weight, 2, 0, K, N, SIDE, FLIP, kind), window_row(weight, 2, 1, K, N, SIDE, FLIP, kind),
        window_row(weight, 2, 2, K, N, SIDE, FLIP, kind),
    )  # fmt: skip
    above = tl.zeros([PIXELS, N], tl.float32)
    here = tl.zeros([PIXELS, N], tl.float32)
    below = tl.zeros([PIXELS, N], tl.float32)
    for row in range(first - 1, last + 1):
        for part in tl.static_range(PARTS):
            seen = column[:, None] + (part - 1) + k[None, :] // K
            mask = inside[:, None] & (seen >= 0) & (seen < width) & (row >= 0) & (row < height)
            if PACK:
                mask = mask & (k[None, :] < 3 * K)
            at = (pixel + row * width + (part - 1))[:, None] * K + k[None, :]
            tile = tl.load(x + at, mask=mask, other=0.0)
            above = tl.dot(tile, window[6 + part], above)
            here = tl.dot(tile, window[3 + part], here)
            below = tl.dot(tile, window[part], below)
        to = (pixel + (row - 1) * width)[:, None] * N + n[None, :]
        tl.store(out + to, above.to(kind), mask=inside[:, None] & (row > first) & (n[None, :] < N))
        above = here
        here = below
        below = tl.zeros([PIXELS, N], tl.float32)


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


def launch_convolve(x: Tensor, weight: Tensor, out: Tensor, flip: bool, tile: Tile) -> None:
    images, k, height, width = x.shape
    n = out.shape[1]
    grid = (triton.cdiv(images * width, tile.pixels), triton.cdiv(height, tile.strip))
    with on_device_of(x):
        convolve_kernel[grid](
            x, weight, out, images, height, width, tile.strip,
            K=k, N=n, SIDE=triton.next_power_of_2(3 * k) if tile.pack else k, FLIP=flip,
            PIXELS=tile.pixels, PACK=tile.pack, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip


def launch_weight(x: Tensor, grad: Tensor, tile: WeightTile) -> Tensor:
    """Each worker's sum, as (worker, out, 3, 3, in) in float32."""
    images, cin, height, width = x.shape
    cout = grad.shape[1]
    strips = triton.cdiv(height, tile.strip)
    work = triton.cdiv(images * width, tile.pixels) * strips
    workers = min(work, tile.workers)
    partials = torch.empty((workers, cout, 3, 3, cin), dtype=torch.float32, device=x.device)
    with on_device_of(x):
        weight_kernel[(workers, 3 if tile.split else 1)](
            x, grad, partials, images, height, width, tile.strip, strips, work,
            CIN=cin, COUT=cout, WIDE=triton.next_power_of_2(3 * cin),
            SIDE=cout if tile.split else triton.next_power_of_2(3 * cout),
            PIXELS=tile.pixels, SPLIT=tile.split, num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return partials


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda and torch.cuda.device_count() > 1 else _NOTHING
