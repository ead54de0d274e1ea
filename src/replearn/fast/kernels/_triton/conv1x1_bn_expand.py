"""Triton kernels of the per-channel steps of `conv1x1_bn.py`: a program computes one output channel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch_cache import is_aligned, launch_cached
from .bn_add_relu import update_running_stats
from .running_statistics import Running

jit: Any = triton.jit


@jit
def fold_norm_kernel(
    weight, spread, centre, gamma, beta, running_mean, running_variance, batches, scaled, shift, numbers,
    momentum, unbiased, eps, columns, rows,
    HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr, TRACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    w = tl.load(weight + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    a = tl.load(spread + row * columns + column, mask=inside, other=0.0)
    m = tl.load(centre + column, mask=inside, other=0.0)
    mean, variance = tl.sum(w * m), tl.sum(w * a)
    variance = tl.where(variance < 0, 0.0, variance)  # rounding
    inverse = 1.0 / tl.sqrt(variance + eps)
    scale = inverse
    if HAS_GAMMA:
        scale = inverse * tl.load(gamma + row).to(tl.float32)
    moved = -scale * mean
    if HAS_BETA:
        moved += tl.load(beta + row).to(tl.float32)
    tl.store(scaled + row * columns + column, (scale * w).to(scaled.dtype.element_ty), mask=inside)
    tl.store(shift + row, moved.to(shift.dtype.element_ty))
    tl.store(numbers + row, mean)
    tl.store(numbers + rows + row, variance)
    tl.store(numbers + 2 * rows + row, inverse)
    tl.store(numbers + 3 * rows + row, scale)
    if TRACKED:
        update_running_stats(
            running_mean, running_variance, batches, row, mean, variance, momentum, unbiased, row == 0
        )


@jit(do_not_specialize=["count"])
def norm_grads_kernel(
    weight, outer, sums, numbers, centre, spread, d_gamma, turned, offsets, d_weight, count, columns, rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    w = tl.load(weight + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(outer + row * columns + column, mask=inside, other=0.0)
    d_beta = tl.load(sums + row)
    mean, inverse = tl.load(numbers + row), tl.load(numbers + 2 * rows + row)
    scale = tl.load(numbers + 3 * rows + row)
    slope = inverse * (tl.sum(w * o) - mean * d_beta)
    k = scale * inverse * slope / count
    tl.store(d_gamma + row, slope)
    tl.store(turned + row * columns + column, -k * w, mask=inside)
    tl.store(offsets + row, k * mean - scale * d_beta / count)
    m = tl.load(centre + column, mask=inside, other=0.0)
    a = tl.load(spread + row * columns + column, mask=inside, other=0.0)
    made = scale * (o - d_beta * m - slope * inverse * a)
    tl.store(d_weight + row * columns + column, made.to(d_weight.dtype.element_ty), mask=inside)


def fold_norm(
    weight: Tensor, spread: Tensor, centre: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float,
    dtype: torch.dtype, running: Running | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `fold_norm_reference`; updates running statistics if given."""
    rows, columns = weight.shape
    scaled = torch.empty((rows, columns), dtype=dtype, device=weight.device)
    shift = torch.empty(rows, dtype=dtype, device=weight.device)
    numbers = torch.empty((4, rows), dtype=torch.float32, device=weight.device)
    moved = running.tensors if running else (weight, weight, weight)
    per_row = (weight if gamma is None else gamma, weight if beta is None else beta, *moved)
    others = (eps, columns, rows, gamma is not None, beta is not None, running is not None, block_for(columns))
    key = (dtype, others, *((tensor.dtype, is_aligned(tensor)) for tensor in per_row))
    steps = (running.momentum, running.unbiased) if running else (0.0, 1.0)
    given = (weight, spread, centre, *per_row, scaled, shift, numbers, *steps, *others)
    launch_cached(fold_norm_kernel, rows, weight, key, given)
    return scaled, shift, numbers


def norm_grads(
    weight: Tensor, outer: Tensor, d_beta: Tensor, numbers: Tensor, count: int, centre: Tensor, spread: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `norm_grads_reference`."""
    rows, columns = weight.shape
    turned = torch.empty((rows, columns), dtype=torch.float32, device=weight.device)
    d_weight = torch.empty((rows, columns), dtype=dtype, device=weight.device)
    d_gamma, offsets = torch.empty((2, rows), dtype=torch.float32, device=weight.device).unbind()
    others = (columns, rows, block_for(columns))
    # a row of one tensor of two may be unaligned
    key = (dtype, others, is_aligned(offsets))
    tensors = (weight, outer, d_beta, numbers, centre, spread, d_gamma, turned, offsets, d_weight)
    launch_cached(norm_grads_kernel, rows, weight, key, (*tensors, count, *others))
    return d_gamma, turned, offsets, d_weight


def block_for(columns: int) -> int:
    return max(16, int(triton.next_power_of_2(columns)))
