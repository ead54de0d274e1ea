"""The kernels of `fused.py`, one each way, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..synthesis import EPS

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_NOTHING = nullcontext()
jit: Any = triton.jit
_FIELDS: Any = tl.constexpr(12)  # numbers in a line of the table


@jit
def row_scale(pointer, present, columns, normalise, eps, BLOCK: tl.constexpr):
    """1 / sqrt(sum of squares + eps) of a row, or 1 where rows are taken as they are."""
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
    lines, factors, owners, grads, partials, num_partials, previous_grads, next_grads, correction_grads, eps,
    SOURCE: tl.constexpr, BLOCK: tl.constexpr, FIELDS: tl.constexpr,
    WANTS_SOURCES: tl.constexpr, WANTS_CORRECTIONS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner = tl.load(owners + 2 * program)
    row = tl.load(owners + 2 * program + 1).to(tl.int64)
    line = lines + owner * FIELDS
    previous_at, next_at = tl.load(line), tl.load(line + 1)
    a_at, b_at = tl.load(line + 3), tl.load(line + 4)
    start_of_weight, columns = tl.load(line + 5), tl.load(line + 6)
    heads, width = tl.load(line + 7), tl.load(line + 8)
    by_row, normalise, partial = tl.load(line + 9), tl.load(line + 10), tl.load(line + 11)
    factor, scale = tl.load(factors + 2 * owner), tl.load(factors + 2 * owner + 1)
    previous = previous_at.to(tl.pointer_type(SOURCE)) + row * columns
    following = next_at.to(tl.pointer_type(SOURCE)) + row * columns
    a, b = a_at.to(tl.pointer_type(tl.float32)), b_at.to(tl.pointer_type(tl.float32))
    a_unit = row_scale(previous, previous_at != 0, columns, normalise, eps, BLOCK)
    b_unit = row_scale(following, next_at != 0, columns, normalise, eps, BLOCK)
    place = start_of_weight + row * columns
    a_along, b_along = 0.0, 0.0  # sums over the row of (coefficient * gradient * source)
    for head in range(heads):
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
        at = partial + row * heads + head
        tl.store(partials + at, a_sum * a_unit * factor)
        tl.store(partials + num_partials + at, b_sum * b_unit * factor)
        if WANTS_SOURCES:
            a_along += a_sum * tl.load(a + row * by_row + head, mask=a_at != 0, other=1.0)
            b_along += b_sum * tl.load(b + row * by_row + head, mask=b_at != 0, other=1.0)
    if WANTS_SOURCES:
        # d(P / |P|) = (I - P P^T / |P|^2) dP / |P|; where rows are not normalised the second part is nothing
        a_along = tl.where(normalise > 0, a_along * a_unit * a_unit * a_unit, 0.0)
        b_along = tl.where(normalise > 0, b_along * b_unit * b_unit * b_unit, 0.0)
        for head in range(heads):
            a_head = tl.load(a + row * by_row + head, mask=a_at != 0, other=1.0) * a_unit
            b_head = tl.load(b + row * by_row + head, mask=b_at != 0, other=1.0) * b_unit
            for start in range(0, width, BLOCK):
                inside = start + tl.arange(0, BLOCK)
                column = head * width + inside
                mask = inside < width
                g = tl.load(grads + place + column, mask=mask, other=0.0).to(tl.float32) * scale
                p = tl.load(previous + column, mask=mask & (previous_at != 0), other=0.0).to(tl.float32)
                n = tl.load(following + column, mask=mask & (next_at != 0), other=0.0).to(tl.float32)
                p_grad = factor * (a_head * g - a_along * p)
                n_grad = factor * (b_head * g - b_along * n)
                tl.store(previous_grads + place + column, p_grad.to(SOURCE), mask=mask)
                tl.store(next_grads + place + column, n_grad.to(SOURCE), mask=mask)


def launch_forward(tables: tuple[Tensor, ...], out: Tensor, source: torch.dtype, layouts: Sequence[Any]) -> None:
    lines, factors, owners = tables
    with torch.cuda.device(out.device) if out.is_cuda and torch.cuda.device_count() > 1 else _NOTHING:
        forward_kernel[(owners.shape[0],)](
            lines, factors, owners, out, EPS, SOURCE=_TYPES[source], BLOCK=block_for(layouts), FIELDS=_FIELDS
        )


def launch_backward(
    tables: tuple[Tensor, ...],
    grads: Tensor,
    partials: Tensor,
    sources: list[Tensor],
    corrections: Tensor,
    source: torch.dtype,
    layouts: Sequence[Any],
    *,
    wants_sources: bool,
    wants_corrections: bool,
) -> None:
    lines, factors, owners = tables
    with torch.cuda.device(grads.device) if grads.is_cuda and torch.cuda.device_count() > 1 else _NOTHING:
        backward_kernel[(owners.shape[0],)](
            lines, factors, owners, grads, partials, partials.shape[1], sources[0], sources[1], corrections, EPS,
            SOURCE=_TYPES[source], BLOCK=block_for(layouts), FIELDS=_FIELDS,
            WANTS_SOURCES=wants_sources, WANTS_CORRECTIONS=wants_corrections,
        )  # fmt: skip


def block_for(layouts: Sequence[Any]) -> int:
    """Columns that a program takes at a time."""
    widest = max(layout.columns // layout.heads for layout in layouts)
    return max(16, min(1024, int(triton.next_power_of_2(widest))))
