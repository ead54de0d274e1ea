"""The Triton kernels of a BatchNorm with a sum and a ReLU after it, two each way, and their launches.

A tensor in channels_last order is a table of pixels and channels. The first kernel of a pair sums along pixels: a
program takes a span of them for some channels and stores its sums, and whoever of a channel's programs comes last
adds them all up, in the order of programs, and settles what follows from them. The second writes the result.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import launch_cached
from .running_statistics import Running

jit: Any = triton.jit
# numbers that a program has on the chip at a time, where it reads several tensors, and where it reads one
FEW, MANY = 4096, 8192
SUMMED, WRITTEN = 32, 128  # channels that it takes at most: few, so that many share the adding up
WARPS = 8
PROGRAMS = 2  # that sum, for each multiprocessor


@jit
def add_up(partials, column, programs, channels, TOGETHER: tl.constexpr, CHANNELS: tl.constexpr):
    """The two sums of all programs for these channels."""
    first = tl.zeros((TOGETHER, CHANNELS), tl.float32)
    second = tl.zeros((TOGETHER, CHANNELS), tl.float32)
    for start in range(0, programs, TOGETHER):
        program = start + tl.arange(0, TOGETHER)[:, None]
        at = 2 * program * channels + column[None, :]
        first += tl.load(partials + at, mask=program < programs, other=0.0, cache_modifier=".cg")
        second += tl.load(partials + at + channels, mask=program < programs, other=0.0, cache_modifier=".cg")
    return tl.sum(first, 0), tl.sum(second, 0)


@jit
def is_last(counters, block, programs):
    """Whether all programs of these channels have stored their sums; the one that learns so starts anew."""
    tl.debug_barrier()  # every thread has stored what it had
    came = tl.atomic_add(counters + block, 1)
    last = came == programs - 1
    if last:
        tl.store(counters + block, 0)
    return last


@jit
def follow(running_mean, running_variance, batches, at, mean, variance, momentum, unbiased, count):
    """Move a norm's running statistics, and where `count` is true the number of batches."""
    old = tl.load(running_mean + at)
    tl.store(running_mean + at, old + momentum * (mean - old))
    old = tl.load(running_variance + at)
    tl.store(running_variance + at, old + momentum * (variance * unbiased - old))
    if count:
        tl.store(batches, tl.load(batches) + 1)


@jit
def read_gradient(grad, other, at, inside, BOTH: tl.constexpr):
    """A gradient, which may be in two parts."""
    dy = tl.load(grad + at, mask=inside, other=0.0)
    if BOTH:
        dy = (dy.to(tl.float32) + tl.load(other + at, mask=inside, other=0.0).to(tl.float32)).to(dy.dtype)
    return dy


@jit
def let_through(dy, y, passed, at, inside):
    """What a ReLU with the result y lets through of a gradient; it is stored, too."""
    dy = tl.where(tl.load(y + at, mask=inside, other=0.0) <= 0, 0.0, dy).to(passed.dtype.element_ty)
    tl.store(passed + at, dy, mask=inside)
    return dy


@jit(
    do_not_specialize=["pixels", "span", "programs"],
    do_not_specialize_on_alignment=["gamma", "beta", "running_mean", "running_variance", "batches"],
)
def statistics_kernel(
    x, gamma, beta, running_mean, running_variance, batches, counters, numbers, partials,
    pixels, span, programs, channels, eps, momentum, unbiased,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, TOGETHER: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """Mean, 1 / sigma, scale and shift of every channel into `numbers`: a norm is (x - mean) scale + shift."""
    across = channels // CHANNELS
    program, block = tl.program_id(0) // across, tl.program_id(0) % across
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    pivot = tl.load(x + column).to(tl.float32)  # sums of what is near zero keep their digits
    first = tl.zeros((PIXELS, CHANNELS), tl.float32)
    second = tl.zeros((PIXELS, CHANNELS), tl.float32)
    end = tl.minimum(pixels, (program + 1) * span)
    for start in range(program * span, end, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        inside = pixel[:, None] < end
        value = tl.load(x + pixel[:, None] * channels + column[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.where(inside, value - pivot[None, :], 0.0)
        first += value
        second += value * value
    tl.store(partials + 2 * program * channels + column, tl.sum(first, 0))
    tl.store(partials + (2 * program + 1) * channels + column, tl.sum(second, 0))
    if is_last(counters, block, programs):
        near, square = add_up(partials, column, programs, channels, TOGETHER, CHANNELS)
        near /= pixels
        mean = pivot + near
        variance = square / pixels - near * near
        variance = tl.where(variance < 0, 0.0, variance)
        inverse = 1.0 / tl.sqrt(variance + eps)
        scale = inverse * tl.load(gamma + column).to(tl.float32)
        tl.store(numbers + column, mean)
        tl.store(numbers + channels + column, inverse)
        tl.store(numbers + 2 * channels + column, scale)
        tl.store(numbers + 3 * channels + column, tl.load(beta + column).to(tl.float32))
        if FOLLOWED:
            count = block == 0
            follow(running_mean, running_variance, batches, column, mean, variance, momentum, unbiased, count)


@jit(do_not_specialize=["pixels"])
def apply_kernel(
    x, residual, numbers, out, pixels, channels,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """out = relu((x - mean) scale + shift + residual)."""
    across = channels // CHANNELS
    place, block = tl.program_id(0) // across, tl.program_id(0) % across
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    mean, scale = tl.load(numbers + column)[None, :], tl.load(numbers + 2 * channels + column)[None, :]
    shift = tl.load(numbers + 3 * channels + column)[None, :]
    pixel = place * PIXELS + tl.arange(0, PIXELS)
    inside = pixel[:, None] < pixels
    at = pixel[:, None] * channels + column[None, :]
    made = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean) * scale + shift
    if ADDED:
        made += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    made = tl.where(made <= 0, 0.0, made)  # so that what is not a number stays that
    tl.store(out + at, made.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["pixels", "span", "programs"])
def slopes_kernel(
    grad, other, x, y, numbers, passed, slopes, counters, factors, partials,
    pixels, span, programs, channels,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, TOGETHER: tl.constexpr, ADDED: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """The gradients of gamma and beta into `slopes`; what a pixel's gradient is made with, into `factors`.

    Where a residual was added, the gradient that the ReLU lets through is that of the residual: it is stored.
    Elsewhere whether it passes is found again from x, and y need not be read. The gradient may be in two parts.
    """
    across = channels // CHANNELS
    program, block = tl.program_id(0) // across, tl.program_id(0) % across
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    mean, inverse = tl.load(numbers + column), tl.load(numbers + channels + column)
    scale, shift = tl.load(numbers + 2 * channels + column), tl.load(numbers + 3 * channels + column)
    first = tl.zeros((PIXELS, CHANNELS), tl.float32)
    second = tl.zeros((PIXELS, CHANNELS), tl.float32)
    end = tl.minimum(pixels, (program + 1) * span)
    for start in range(program * span, end, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        inside = pixel[:, None] < end
        at = pixel[:, None] * channels + column[None, :]
        dy = read_gradient(grad, other, at, inside, BOTH)
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean[None, :]
        if ADDED:
            dy = let_through(dy, y, passed, at, inside)
        else:
            made = (value * scale[None, :] + shift[None, :]).to(x.dtype.element_ty)
            dy = tl.where(made <= 0, 0.0, dy)
        dz = dy.to(tl.float32)
        first += dz
        second += dz * value
    tl.store(partials + 2 * program * channels + column, tl.sum(first, 0))
    tl.store(partials + (2 * program + 1) * channels + column, tl.sum(second, 0))
    if is_last(counters, block, programs):
        d_beta, along = add_up(partials, column, programs, channels, TOGETHER, CHANNELS)
        tl.store(slopes + column, along * inverse)
        tl.store(slopes + channels + column, d_beta)
        # dx = scale (dz - mean(dz) - (x - mean) / sigma^2 mean(dz (x - mean)))
        turn = -scale * inverse * inverse * along / pixels
        tl.store(factors + column, turn)
        tl.store(factors + channels + column, -scale * d_beta / pixels)


@jit(do_not_specialize=["pixels", "span", "programs"])
def passed_kernel(
    grad, other, y, passed, sums, counters, partials, pixels, span, programs, channels,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, TOGETHER: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """The gradient that a ReLU with the result y lets through, and its sum along pixels; likewise."""
    across = channels // CHANNELS
    program, block = tl.program_id(0) // across, tl.program_id(0) % across
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    first = tl.zeros((PIXELS, CHANNELS), tl.float32)
    end = tl.minimum(pixels, (program + 1) * span)
    for start in range(program * span, end, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        inside = pixel[:, None] < end
        at = pixel[:, None] * channels + column[None, :]
        first += let_through(read_gradient(grad, other, at, inside, BOTH), y, passed, at, inside).to(tl.float32)
    total = tl.sum(first, 0)  # stored twice, for who adds up two
    tl.store(partials + 2 * program * channels + column, total)
    tl.store(partials + (2 * program + 1) * channels + column, total)
    if is_last(counters, block, programs):
        total, _ = add_up(partials, column, programs, channels, TOGETHER, CHANNELS)
        tl.store(sums + column, total)


@jit(do_not_specialize=["pixels"])
def gradient_kernel(
    grad, x, numbers, factors, out, pixels, channels,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The gradient of x: scale dz + turn (x - mean) + offset."""
    across = channels // CHANNELS
    place, block = tl.program_id(0) // across, tl.program_id(0) % across
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    mean, scale = tl.load(numbers + column)[None, :], tl.load(numbers + 2 * channels + column)[None, :]
    turn = tl.load(factors + column)[None, :]
    offset = tl.load(factors + channels + column)[None, :]
    pixel = place * PIXELS + tl.arange(0, PIXELS)
    inside = pixel[:, None] < pixels
    at = pixel[:, None] * channels + column[None, :]
    dz = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean
    if not ADDED:
        shift = tl.load(numbers + 3 * channels + column)[None, :]
        dz = tl.where((value * scale + shift).to(x.dtype.element_ty) <= 0, 0.0, dz)
    tl.store(out + at, (scale * dz + turn * value + offset).to(out.dtype.element_ty), mask=inside)


def launch_statistics(
    x: Tensor, affine: tuple[Tensor, Tensor], running: Running | None, counters: Tensor, numbers: Tensor,
    eps: float,
) -> None:  # fmt: skip
    """Mean, 1 / sigma, scale and shift of every channel into `numbers`; running statistics, if any, move."""
    pixels, channels = table_of(x)
    cut = Cut.of(pixels, channels, MANY, x.device)
    moved = running.tensors if running else (numbers, numbers, counters)
    steps = (running.momentum, running.unbiased) if running else (0.0, 1.0)
    given = (x, *affine, *moved, counters, numbers, cut.room(x.device))
    others = (pixels, cut.span, cut.programs, channels, eps, *steps)
    constants = (cut.pixels, cut.channels, cut.together, running is not None)
    kind = (x.dtype, channels, eps, constants)
    programs = cut.programs * (channels // cut.channels)
    launch_cached(statistics_kernel, programs, x, kind, (*given, *others, *constants), num_warps=WARPS)


def launch_apply(x: Tensor, residual: Tensor | None, numbers: Tensor, out: Tensor) -> None:
    """relu((x - mean) scale + shift + residual) into `out`."""
    pixels, channels = table_of(x)
    width = widest(channels, WRITTEN)
    constants = (FEW // width, width, residual is not None)
    given = (x, x if residual is None else residual, numbers, out, pixels, channels, *constants)
    programs = -(-pixels // constants[0]) * (channels // width)
    launch_cached(apply_kernel, programs, x, (x.dtype, channels, constants), given, num_warps=WARPS)


def launch_slopes(
    grad: Tensor, other: Tensor | None, x: Tensor, y: Tensor | None, numbers: Tensor, passed: Tensor | None,
    slopes: Tensor, counters: Tensor,
) -> Tensor:  # fmt: skip
    """The gradients of gamma and beta into `slopes`, what passed the ReLU into `passed`; returns the factors."""
    pixels, channels = table_of(x)
    cut = Cut.of(pixels, channels, FEW, x.device)
    factors = torch.empty((2, channels), dtype=torch.float32, device=x.device)
    second, result, rest = (x if tensor is None else tensor for tensor in (other, y, passed))
    given = (grad, second, x, result, numbers, rest, slopes, counters, factors, cut.room(x.device))
    constants = (cut.pixels, cut.channels, cut.together, y is not None, other is not None)
    others = (pixels, cut.span, cut.programs, channels)
    programs = cut.programs * (channels // cut.channels)
    kind = (x.dtype, channels, constants)
    launch_cached(slopes_kernel, programs, x, kind, (*given, *others, *constants), num_warps=WARPS)
    return factors


def launch_passed(
    grad: Tensor, other: Tensor | None, y: Tensor, passed: Tensor, sums: Tensor, counters: Tensor
) -> None:
    """What a ReLU lets through into `passed`, and its sums into `sums`."""
    pixels, channels = table_of(y)
    cut = Cut.of(pixels, channels, FEW, y.device)
    constants = (cut.pixels, cut.channels, cut.together, other is not None)
    others = (pixels, cut.span, cut.programs, channels)
    second = y if other is None else other
    given = (grad, second, y, passed, sums, counters, cut.room(y.device), *others, *constants)
    programs = cut.programs * (channels // cut.channels)
    launch_cached(passed_kernel, programs, y, (y.dtype, channels, constants), given, num_warps=WARPS)


def launch_gradient(
    grad: Tensor, x: Tensor, numbers: Tensor, factors: Tensor, out: Tensor, *, passed: bool
) -> None:
    """The gradient of x into `out`; `passed` says whether `grad` has been through the ReLU."""
    pixels, channels = table_of(x)
    width = widest(channels, WRITTEN)
    constants = (FEW // width, width, passed)
    given = (grad, x, numbers, factors, out, pixels, channels, *constants)
    programs = -(-pixels // constants[0]) * (channels // width)
    launch_cached(gradient_kernel, programs, x, (x.dtype, channels, constants), given, num_warps=WARPS)


class Cut(NamedTuple):
    """How the summing kernels cut a table: their programs for each block of channels, and what each takes."""

    programs: int
    span: int  # pixels of a program
    pixels: int  # at a time
    channels: int
    together: int  # programs' sums that are added at a time
    size: int  # of all sums

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(pixels: int, channels: int, numbers: int, device: torch.device) -> Cut:
        width = widest(channels, SUMMED)
        step = numbers // width
        most = max(1, PROGRAMS * num_multiprocessors(device) * width // channels)
        span = -(-pixels // (most * step)) * step
        programs = -(-pixels // span)
        return Cut(programs, span, step, width, step, 2 * programs * channels)

    def room(self, device: torch.device) -> Tensor:
        return torch.empty(self.size, dtype=torch.float32, device=device)


def widest(channels: int, most: int) -> int:
    """The largest power of two that channels are a multiple of, up to `most`."""
    return min(channels & -channels, most)


def table_of(x: Tensor) -> tuple[int, int]:
    channels = x.shape[1]
    return x.numel() // channels, channels


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
