"""Triton kernels of attention over few tokens.

A program computes whole heads of one sequence: q, k and v fit into registers, so there is no online softmax, and
the backward pass recomputes P from q and k. Tensors are packed as (sequence, token, q | k | v, head, dim).
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from torch import Tensor

from .._dispatch import launch as launch_kernel

if TYPE_CHECKING:
    from ..attention_short import Tile

jit: Any = triton.jit


@jit
def unnormalised(q, k, tokens, scale, ROWS: tl.constexpr):
    """exp(s - max s) of a head's scores s, and its row sums; masked keys give 0."""
    seen = tl.arange(0, ROWS)[None, :] < tokens
    scores = tl.where(seen, tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634), float("-inf"))
    weights = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return weights, tl.sum(weights, 1)[:, None]


@jit
def attend_kernel(
    qkv, out, tokens, heads, scale,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None]
    number = tl.arange(0, WIDTH)[None, :]
    mask = row < tokens
    token = tl.program_id(0) * tokens + row
    part = heads * WIDTH
    for step in tl.static_range(HEADS):
        head = tl.program_id(1) * HEADS + step
        at = qkv + token * (3 * part) + head * WIDTH + number
        q = tl.load(at, mask=mask, other=0.0)
        k = tl.load(at + part, mask=mask, other=0.0)
        v = tl.load(at + 2 * part, mask=mask, other=0.0)
        weights, total = unnormalised(q, k, tokens, scale, ROWS)
        made = tl.dot(weights.to(DTYPE), v) / total
        tl.store(out + token * part + head * WIDTH + number, made.to(DTYPE), mask=mask)


@jit
def attend_back_kernel(
    qkv, grad, out, tokens, heads, scale,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    row = tl.arange(0, ROWS)[:, None]
    number = tl.arange(0, WIDTH)[None, :]
    mask = row < tokens  # padded rows are zero in grad and ds, and add nothing
    token = tl.program_id(0) * tokens + row
    part = heads * WIDTH
    for step in tl.static_range(HEADS):
        head = tl.program_id(1) * HEADS + step
        place = token * (3 * part) + head * WIDTH + number
        q = tl.load(qkv + place, mask=mask, other=0.0)
        k = tl.load(qkv + place + part, mask=mask, other=0.0)
        v = tl.load(qkv + place + 2 * part, mask=mask, other=0.0)
        dy = tl.load(grad + token * part + head * WIDTH + number, mask=mask, other=0.0)
        weights, total = unnormalised(q, k, tokens, scale, ROWS)
        p = weights / total
        dp = tl.dot(dy, tl.trans(v))
        dv = tl.dot(tl.trans(p.to(DTYPE)), dy)
        tl.store(out + place + 2 * part, dv.to(DTYPE), mask=mask)
        ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(DTYPE)
        dq = tl.dot(ds, k)
        tl.store(out + place, dq.to(DTYPE), mask=mask)
        dk = tl.dot(tl.trans(ds), q)
        tl.store(out + place + part, dk.to(DTYPE), mask=mask)


def launch(kernel: Any, tensors: tuple[Tensor, ...], heads: int, tile: Tile) -> None:
    """`attend_kernel` of qkv and out, or `attend_back_kernel` of qkv, gradient and out; all contiguous."""
    sequences, tokens, packed = tensors[0].shape
    width = packed // (3 * heads)
    together = gcd(heads, tile.heads)
    launch_kernel(
        kernel, (sequences, heads // together), tensors[0],
        *tensors, tokens, heads, width**-0.5, ROWS=tile.rows, WIDTH=width, HEADS=together,
        num_warps=tile.num_warps * (2 if width > 64 else 1), maxnreg=tile.registers,
    )  # fmt: skip
