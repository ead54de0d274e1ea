"""Triton kernels of `fused.py`: forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...operators._base.synthesis import EPS
from ..kernels._dispatch import launch

if TYPE_CHECKING:
    from .batch import Batch

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
jit: Any = triton.jit
FIELDS = 16  # of a line of the table


@jit
def row_scale(pointer, present, columns, normalise, eps, BLOCK: tl.constexpr):
    """1 / sqrt(sum of squares + eps) of a row, or 1 without `normalise`."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns * normalise, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(pointer + column, mask=(column < columns) & present, other=0.0).to(tl.float32)
        total += value * value
    length = tl.sqrt(tl.sum(total) + eps)
    return tl.where(normalise > 0, 1.0 / length, 1.0)


@jit
def forward_kernel(
    lines, factors, owners, out, eps, SOURCE: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr
):
    program = tl.program_id(0)
    owner = tl.load(owners + 2 * program)
    row = tl.load(owners + 2 * program + 1).to(tl.int64)
    line = lines + owner * FIELDS
    previous_at, next_at, correction_at = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    a_at, b_at = tl.load(line + 3), tl.load(line + 4)
    start_of_weight, columns = tl.load(line + 5), tl.load(line + 6)
    heads, width = tl.load(line + 7), tl.load(line + 8)
    by_row, normalise = tl.load(line + 9), tl.load(line + 10)
    factor, scale = tl.load(factors + 2 * owner), tl.load(factors + 2 * owner + 1)
    previous = previous_at.to(tl.pointer_type(SOURCE)) + row * columns
    following = next_at.to(tl.pointer_type(SOURCE)) + row * columns
    correction = correction_at.to(tl.pointer_type(SOURCE)) + row * columns
    a, b = a_at.to(tl.pointer_type(tl.float32)), b_at.to(tl.pointer_type(tl.float32))
    a_scale = row_scale(previous, previous_at != 0, columns, normalise, eps, BLOCK) * factor
    b_scale = row_scale(following, next_at != 0, columns, normalise, eps, BLOCK) * factor
    target = out + start_of_weight + row * columns
    for head in range(heads):
        at = row * by_row + head
        a_head = tl.load(a + at, mask=a_at != 0, other=1.0) * a_scale
        b_head = tl.load(b + at, mask=b_at != 0, other=1.0) * b_scale
        for start in range(0, width, BLOCK):
            inside = start + tl.arange(0, BLOCK)
            column = head * width + inside
            mask = inside < width
            p = tl.load(previous + column, mask=mask & (previous_at != 0), other=0.0).to(tl.float32)
            n = tl.load(following + column, mask=mask & (next_at != 0), other=0.0).to(tl.float32)
            d = tl.load(correction + column, mask=mask & (correction_at != 0), other=0.0).to(tl.float32)
            made = scale * (a_head * p + b_head * n + d)
            tl.store(target + column, made.to(out.dtype.element_ty), mask=mask)


@jit
def backward_kernel(
    lines, factors, owners, grads, partials, source_grads, correction_grads, eps,
    SOURCE: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
    WANTS_SOURCES: tl.constexpr, WANTS_CORRECTIONS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owners + 2 * program)
    row = tl.load(owners + 2 * program + 1).to(tl.int64)
    line = lines + owner * FIELDS
    previous_at, next_at, correction_at = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    a_at, b_at = tl.load(line + 3), tl.load(line + 4)
    start_of_weight, columns = tl.load(line + 5), tl.load(line + 6)
    heads, width = tl.load(line + 7), tl.load(line + 8)
    by_row, normalise, rows = tl.load(line + 9), tl.load(line + 10), tl.load(line + 11)
    a_partials, b_partials = partials + tl.load(line + 12), partials + tl.load(line + 13)
    previous_grads = source_grads + tl.load(line + 14) + row * columns
    next_grads = source_grads + tl.load(line + 15) + row * columns
    factor, scale = tl.load(factors + 2 * owner), tl.load(factors + 2 * owner + 1)
    previous = previous_at.to(tl.pointer_type(SOURCE)) + row * columns
    following = next_at.to(tl.pointer_type(SOURCE)) + row * columns
    a, b = a_at.to(tl.pointer_type(tl.float32)), b_at.to(tl.pointer_type(tl.float32))
    a_unit = row_scale(previous, previous_at != 0, columns, normalise, eps, BLOCK)
    b_unit = row_scale(following, next_at != 0, columns, normalise, eps, BLOCK)
    place = start_of_weight + row * columns
    a_along, b_along = 0.0, 0.0  # sums over the row of (coefficient * gradient * source)
    # a weight that is only cast has no gradient that depends on the sources
    summed = tl.where((normalise > 0) | (a_at != 0) | (b_at != 0) | (correction_at != 0), 1, 0)
    for head in range(heads * summed):
        a_dot = tl.zeros([BLOCK], tl.float32)
        b_dot = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            inside = start + tl.arange(0, BLOCK)
            column = head * width + inside
            mask = inside < width
            g = tl.load(grads + place + column, mask=mask, other=0.0).to(tl.float32) * scale
            p = tl.load(previous + column, mask=mask & (previous_at != 0), other=0.0).to(tl.float32)
            n = tl.load(following + column, mask=mask & (next_at != 0), other=0.0).to(tl.float32)
            a_dot += g * p
            b_dot += g * n
            if WANTS_CORRECTIONS:
                tl.store(correction_grads + place + column, g.to(SOURCE), mask=mask)
        a_sum, b_sum = tl.sum(a_dot), tl.sum(b_dot)
        at = head * rows + row  # rows of a head are contiguous
        tl.store(a_partials + at, a_sum * a_unit * factor, mask=a_at != 0)
        tl.store(b_partials + at, b_sum * b_unit * factor, mask=b_at != 0)
        if WANTS_SOURCES:
            a_along += a_sum * tl.load(a + row * by_row + head, mask=a_at != 0, other=1.0)
            b_along += b_sum * tl.load(b + row * by_row + head, mask=b_at != 0, other=1.0)
    if WANTS_SOURCES:
        # d(P / |P|) = (I - P P^T / |P|^2) dP / |P|; without `normalise` only the first term
        a_along = tl.where(normalise > 0, a_along * a_unit * a_unit * a_unit, 0.0)
        b_along = tl.where(normalise > 0, b_along * b_unit * b_unit * b_unit, 0.0)
        has_previous, has_next = previous_at != 0, next_at != 0
        for head in range(heads):
            a_head = tl.load(a + row * by_row + head, mask=a_at != 0, other=1.0) * a_unit
            b_head = tl.load(b + row * by_row + head, mask=b_at != 0, other=1.0) * b_unit
            for start in range(0, width, BLOCK):
                inside = start + tl.arange(0, BLOCK)
                column = head * width + inside
                mask = inside < width
                g = tl.load(grads + place + column, mask=mask, other=0.0).to(tl.float32) * scale
                along = mask & (normalise > 0)
                p = tl.load(previous + column, mask=along & has_previous, other=0.0).to(tl.float32)
                n = tl.load(following + column, mask=along & has_next, other=0.0).to(tl.float32)
                p_grad = factor * (a_head * g - a_along * p)
                n_grad = factor * (b_head * g - b_along * n)
                tl.store(previous_grads + column, p_grad.to(SOURCE), mask=mask & has_previous)
                tl.store(next_grads + column, n_grad.to(SOURCE), mask=mask & has_next)


def launch_forward(batch: Batch, out: Tensor) -> None:
    """All weights into `out`."""
    programs = batch.tables[2].shape[0]
    launch(forward_kernel, programs, out, *batch.tables, out, EPS, _TYPES[batch.source], batch.block, FIELDS)


def launch_backward(batch: Batch, grads: Tensor, partials: Tensor, sources: Tensor, corrections: Tensor) -> None:
    """Gradients into the buffers that are not empty; all tensors are aligned to 16 bytes."""
    programs = batch.tables[2].shape[0]
    tensors = (*batch.tables, grads, partials, sources, corrections)
    wants = (sources.numel() > 0, corrections.numel() > 0)
    given = (*tensors, EPS, _TYPES[batch.source], batch.block, FIELDS, *wants)
    launch(backward_kernel, programs, grads, *given)
