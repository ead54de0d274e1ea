"""Triton kernels of the reduced bottleneck: the norm's per-channel steps, its end, and the gradient of z."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import launch
from .bn_add_relu import update_running_stats
from .linear_residual import matmul_tile

if TYPE_CHECKING:
    from ..bn_add_relu import Running

jit: Any = triton.jit
ROWS, STAGES = 128, 3  # of the end
LITTLE, MUCH = (64, 32, 4), (128, 64, 8)  # BLOCK_N, BLOCK_K and warps
INNER = 64  # BLOCK_K of the gradient


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


@jit
def matmul_tile_plain(made, x, weight, row, column, inner, width, INNER: tl.constexpr):
    """made + a tile of x @ weight, for x (rows, inner) and weight (inner, width)."""
    k = tl.arange(0, INNER)
    left = x + row[:, None] * inner + k[None, :]
    right = weight + k[:, None] * width + column[None, :]
    for start in range(0, inner, INNER):
        made = tl.dot(tl.load(left + start), tl.load(right + start * width), made)
    return made


@jit(do_not_specialize=["rows"])
def input_grad_kernel(
    grad, h, scaled, along, shift, out, rows, wide, narrow,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """out = grad scaled + h along + shift; 0 where h <= 0."""
    across = narrow // COLUMNS
    place = tl.program_id(0)  # neighbours share rows in L2
    row = (place // across) * ROWS + tl.arange(0, ROWS)
    column = (place % across) * COLUMNS + tl.arange(0, COLUMNS)
    within = tl.minimum(row, rows - 1)  # rows past the end are computed and not stored
    made = tl.zeros((ROWS, COLUMNS), tl.float32)
    made = matmul_tile_plain(made, grad, scaled, within, column, wide, narrow, INNER)
    made = matmul_tile_plain(made, h, along, within, column, narrow, narrow, INNER)
    made += tl.load(shift + column)[None, :].to(tl.float32)
    made = tl.where(tl.load(h + within[:, None] * narrow + column[None, :]) <= 0, 0.0, made)
    at = row[:, None] * narrow + column[None, :]
    tl.store(out + at, made.to(out.dtype.element_ty), mask=row[:, None] < rows)


@jit(do_not_specialize=["rows"])
def add_relu_kernel(
    x, z, scaled, shift, out, rows, inner, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """out = relu(x + z scaled^T + shift)."""
    across = width // COLUMNS
    place = tl.program_id(0)  # neighbours share rows in L2
    row = (place // across) * ROWS + tl.arange(0, ROWS)
    column = (place % across) * COLUMNS + tl.arange(0, COLUMNS)
    within = tl.minimum(row, rows - 1)  # rows past the end are computed and not stored
    made = tl.zeros((ROWS, COLUMNS), tl.float32)
    made = matmul_tile(made, z, scaled, within, column, inner, INNER, z.dtype.element_ty)
    made += tl.load(shift + column)[None, :].to(tl.float32)
    made += tl.load(x + within[:, None] * width + column[None, :]).to(tl.float32)
    made = tl.where(made <= 0, 0.0, made)  # propagates NaN
    at = row[:, None] * width + column[None, :]
    tl.store(out + at, made.to(out.dtype.element_ty), mask=row[:, None] < rows)


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
    steps = (running.momentum, running.unbiased) if running else (0.0, 1.0)
    given = (weight, spread, centre, *per_row, scaled, shift, numbers, *steps, *others)
    launch(fold_norm_kernel, rows, weight, *given)
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
    tensors = (weight, outer, d_beta, numbers, centre, spread, d_gamma, turned, offsets, d_weight)
    launch(norm_grads_kernel, rows, weight, *tensors, count, *others)
    return d_gamma, turned, offsets, d_weight


def block_for(columns: int) -> int:
    return max(16, int(triton.next_power_of_2(columns)))


def launch_add_relu(x: Tensor, z: Tensor, scaled: Tensor, shift: Tensor, out: Tensor) -> None:
    """All tensors are contiguous, of one dtype, and aligned to 16 bytes."""
    (rows, width), inner = x.shape, z.shape[1]
    columns, step, warps = LITTLE if inner <= 128 else MUCH
    programs = -(-rows // ROWS) * (width // columns)
    given = (x, z, scaled, shift, out, rows, inner, width, ROWS, columns, step)
    launch(add_relu_kernel, programs, x, *given, num_warps=warps, num_stages=STAGES)


def launch_input_grad(grad: Tensor, h: Tensor, scaled: Tensor, along: Tensor, shift: Tensor, out: Tensor) -> None:
    """All tensors are contiguous, of one dtype, and aligned to 16 bytes."""
    (rows, narrow), wide = h.shape, grad.shape[1]
    tile = (64, 128) if narrow % 128 == 0 else (128, 64)
    programs = -(-rows // tile[0]) * (narrow // tile[1])
    given = (grad, h, scaled, along, shift, out, rows, wide, narrow, *tile, INNER)
    launch(input_grad_kernel, programs, h, *given, num_warps=4, num_stages=3)
