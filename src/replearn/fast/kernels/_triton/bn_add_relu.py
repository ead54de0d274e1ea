"""Triton kernels of BatchNorm + add + ReLU: a reduction and an elementwise kernel for each direction.

A channels_last tensor is a (pixels, channels) matrix. In a reduction each program stores partial sums of a span of
pixels. The last program of a block of channels, found by an atomic counter, adds all partial sums in a fixed order
and computes the statistics or gradients from them.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import launch

if TYPE_CHECKING:
    from ..bn_add_relu import Running

jit: Any = triton.jit
# elements of a program's tile, if it reads several tensors and if it reads one
FEW, MANY = 4096, 8192
SUMMED, WRITTEN = 32, 128  # channels of a tile at most, in reductions and in elementwise kernels
WARPS = 8
PROGRAMS = 2  # of a reduction, per SM


@jit
def sum_partials(partials, column, programs, channels, TOGETHER: tl.constexpr, CHANNELS: tl.constexpr):
    """Both sums over all programs for these channels."""
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
    """True for the last program of these channels; resets the counter."""
    tl.debug_barrier()  # all threads have stored
    came = tl.atomic_add(counters + block, 1)
    last = came == programs - 1
    if last:
        tl.store(counters + block, 0)
    return last


@jit
def update_running_stats(running_mean, running_variance, batches, at, mean, variance, momentum, unbiased, count):
    """Update running statistics, and `num_batches_tracked` if `count`."""
    old = tl.load(running_mean + at)
    tl.store(running_mean + at, old + momentum * (mean - old))
    old = tl.load(running_variance + at)
    tl.store(running_variance + at, old + momentum * (variance * unbiased - old))
    if count:
        tl.store(batches, tl.load(batches) + 1)


@jit
def read_gradient(grad, other, at, inside, BOTH: tl.constexpr):
    """grad, or grad + other."""
    dy = tl.load(grad + at, mask=inside, other=0.0)
    if BOTH:
        dy = (dy.to(tl.float32) + tl.load(other + at, mask=inside, other=0.0).to(tl.float32)).to(dy.dtype)
    return dy


@jit
def relu_backward(dy, y, passed, at, inside):
    """The gradient before a ReLU with output y; also stored in `passed`."""
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
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, TOGETHER: tl.constexpr, TRACKED: tl.constexpr,
):  # fmt: skip
    """Per-channel mean, 1 / sigma, scale and shift into `numbers`; the norm is (x - mean) scale + shift."""
    across = channels // CHANNELS
    program, block = tl.program_id(0) // across, tl.program_id(0) % across
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    pivot = tl.load(x + column).to(tl.float32)  # avoids cancellation in the variance
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
        near, square = sum_partials(partials, column, programs, channels, TOGETHER, CHANNELS)
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
        if TRACKED:
            count = block == 0
            update_running_stats(
                running_mean, running_variance, batches, column, mean, variance, momentum, unbiased, count
            )


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
    made = tl.where(made <= 0, 0.0, made)  # propagates NaN
    tl.store(out + at, made.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["pixels", "span", "programs"])
def affine_grads_kernel(
    grad, other, x, y, numbers, passed, slopes, counters, factors, partials,
    pixels, span, programs, channels,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, TOGETHER: tl.constexpr, ADDED: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """Gradients of gamma and beta into `slopes`, and the coefficients of the input gradient into `factors`.

    With a residual, the gradient before the ReLU is that of the residual, and is stored in `passed`. Without one
    the ReLU's mask is recomputed from x.
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
            dy = relu_backward(dy, y, passed, at, inside)
        else:
            made = (value * scale[None, :] + shift[None, :]).to(x.dtype.element_ty)
            dy = tl.where(made <= 0, 0.0, dy)
        dz = dy.to(tl.float32)
        first += dz
        second += dz * value
    tl.store(partials + 2 * program * channels + column, tl.sum(first, 0))
    tl.store(partials + (2 * program + 1) * channels + column, tl.sum(second, 0))
    if is_last(counters, block, programs):
        d_beta, along = sum_partials(partials, column, programs, channels, TOGETHER, CHANNELS)
        tl.store(slopes + column, along * inverse)
        tl.store(slopes + channels + column, d_beta)
        # dx = scale (dz - mean(dz) - (x - mean) / sigma^2 mean(dz (x - mean)))
        turn = -scale * inverse * inverse * along / pixels
        tl.store(factors + column, turn)
        tl.store(factors + channels + column, -scale * d_beta / pixels)


@jit(do_not_specialize=["pixels", "span", "programs"])
def relu_backward_kernel(
    grad, other, y, passed, sums, counters, partials, pixels, span, programs, channels,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, TOGETHER: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """The gradient before a ReLU with output y into `passed`, and its sum over pixels into `sums`."""
    across = channels // CHANNELS
    program, block = tl.program_id(0) // across, tl.program_id(0) % across
    column = block * CHANNELS + tl.arange(0, CHANNELS)
    first = tl.zeros((PIXELS, CHANNELS), tl.float32)
    end = tl.minimum(pixels, (program + 1) * span)
    for start in range(program * span, end, PIXELS):
        pixel = start + tl.arange(0, PIXELS)
        inside = pixel[:, None] < end
        at = pixel[:, None] * channels + column[None, :]
        first += relu_backward(read_gradient(grad, other, at, inside, BOTH), y, passed, at, inside).to(tl.float32)
    total = tl.sum(first, 0)  # twice, since `sum_partials` reads two sums
    tl.store(partials + 2 * program * channels + column, total)
    tl.store(partials + (2 * program + 1) * channels + column, total)
    if is_last(counters, block, programs):
        total, _ = sum_partials(partials, column, programs, channels, TOGETHER, CHANNELS)
        tl.store(sums + column, total)


@jit(do_not_specialize=["pixels"])
def input_grad_kernel(
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
    """Per-channel mean, 1 / sigma, scale and shift into `numbers`; updates running statistics."""
    moved = running.tensors if running else (numbers, numbers, counters)
    steps = (running.momentum, running.unbiased) if running else (0.0, 1.0)
    tensors = (x, *affine, *moved, counters, numbers)
    reduce_pixels(statistics_kernel, x, MANY, tensors, (running is not None,), (eps, *steps))


def launch_apply(x: Tensor, residual: Tensor | None, numbers: Tensor, out: Tensor) -> None:
    """relu((x - mean) scale + shift + residual) into `out`."""
    tensors = (x, x if residual is None else residual, numbers, out)
    write_pixels(apply_kernel, x, tensors, residual is not None)


def launch_affine_grads(
    grad: Tensor, other: Tensor | None, x: Tensor, y: Tensor | None, numbers: Tensor, passed: Tensor | None,
    slopes: Tensor, counters: Tensor,
) -> Tensor:  # fmt: skip
    """Gradients of gamma and beta into `slopes`, of the residual into `passed`; returns `factors`."""
    factors = torch.empty((2, x.shape[1]), dtype=torch.float32, device=x.device)
    second, result, rest = (x if tensor is None else tensor for tensor in (other, y, passed))
    tensors = (grad, second, x, result, numbers, rest, slopes, counters, factors)
    reduce_pixels(affine_grads_kernel, x, FEW, tensors, (y is not None, other is not None))
    return factors


def launch_relu_backward(
    grad: Tensor, other: Tensor | None, y: Tensor, passed: Tensor, sums: Tensor, counters: Tensor
) -> None:
    """The gradient before a ReLU into `passed`, and its sum over pixels into `sums`."""
    tensors = (grad, y if other is None else other, y, passed, sums, counters)
    reduce_pixels(relu_backward_kernel, y, FEW, tensors, (other is not None,))


def launch_input_grad(
    grad: Tensor, x: Tensor, numbers: Tensor, factors: Tensor, out: Tensor, *, passed: bool
) -> None:
    """The gradient of x into `out`; `passed`: `grad` is already masked by the ReLU."""
    write_pixels(input_grad_kernel, x, (grad, x, numbers, factors, out), passed)


def reduce_pixels(
    kernel: Any, x: Tensor, numbers: int, tensors: tuple[Tensor, ...], flags: tuple[bool, ...],
    floats: tuple[float, ...] = (),
) -> None:  # fmt: skip
    """Launch a reduction over the pixels of x, with tiles of so many numbers."""
    pixels, channels = table_of(x)
    tiling = Tiling.of(pixels, channels, numbers, x.device)
    constants = (tiling.pixels, tiling.channels, tiling.pixels, *flags)  # as many partial sums at a time
    partials = torch.empty(2 * tiling.programs * channels, dtype=torch.float32, device=x.device)
    given = (*tensors, partials, pixels, tiling.span, tiling.programs, channels, *floats, *constants)
    programs = tiling.programs * (channels // tiling.channels)
    launch(kernel, programs, x, *given, num_warps=WARPS)


def write_pixels(kernel: Any, x: Tensor, tensors: tuple[Tensor, ...], flag: bool) -> None:
    """Launch an elementwise kernel on tensors like x."""
    pixels, channels = table_of(x)
    width = widest(channels, WRITTEN)
    constants = (FEW // width, width, flag)
    programs = -(-pixels // constants[0]) * (channels // width)
    given = (*tensors, pixels, channels, *constants)
    launch(kernel, programs, x, *given, num_warps=WARPS)


class Tiling(NamedTuple):
    """Grid and tile of a reduction over pixels."""

    programs: int  # per block of channels
    span: int  # pixels of a program
    pixels: int  # of a tile
    channels: int  # of a tile

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(pixels: int, channels: int, numbers: int, device: torch.device) -> Tiling:
        width = widest(channels, SUMMED)
        step = numbers // width
        most = max(1, PROGRAMS * num_multiprocessors(device) * width // channels)
        span = -(-pixels // (most * step)) * step
        return Tiling(-(-pixels // span), span, step, width)


def widest(channels: int, most: int) -> int:
    """The largest power of two that divides `channels`, up to `most`."""
    return min(channels & -channels, most)


def table_of(x: Tensor) -> tuple[int, int]:
    channels = x.shape[1]
    return x.numel() // channels, channels


@cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
