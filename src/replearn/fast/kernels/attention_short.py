"""Attention over at most 64 tokens, for training in half precision.

    Y = P V,   P = softmax(Q K' / sqrt(d)),
    dV = P' dY,   dS = P o (dP - rowsum(P o dP)) with dP = dY V',   dQ = dS K / sqrt(d),   dK = dS' Q / sqrt(d)

Queries, keys and values are one tensor, as one linear layer makes them, and so is their gradient: nothing is
permuted, copied or stacked, and nothing else is kept for the backward pass. Softmax is in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import register_flop_formula

from ...errors import ReplearnError
from ._dispatch import HALF, compute_dtype, in_transform, triton_runs_on

WIDTHS = (16, 32, 64, 128)  # of a head
MOST_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Launch parameters of a program, which computes whole heads."""

    rows: int  # tokens at most
    heads: int  # per program, at most; lowered to a divisor of the number of heads
    num_warps: int  # for heads up to 64 wide; 128 takes twice as many
    registers: int | None = None  # maxnreg


# `benchmarks/short_attention.py` measures alternatives
FORWARD = (
    Tile(rows=16, heads=2, num_warps=1),  # one warp needs no barriers
    Tile(rows=32, heads=1, num_warps=1, registers=128),
    Tile(rows=64, heads=3, num_warps=4),  # fewer warps would spill registers
)
BACKWARD = (
    Tile(rows=16, heads=2, num_warps=1),
    Tile(rows=32, heads=1, num_warps=1, registers=168),  # 12 programs per SM without spills
    Tile(rows=64, heads=1, num_warps=4),
)


def tile_for(tiles: tuple[Tile, ...], tokens: int) -> Tile:
    return next(tile for tile in tiles if tokens <= tile.rows)


def attention_short(qkv: Tensor, heads: int) -> Tensor:
    """Attention from (batch, tokens, 3 heads width) to (batch, tokens, heads width).

    The kernels take 64 tokens at most and heads 16, 32, 64 or 128 wide, in half precision, by dtype or under
    autocast; torch computes the rest. Raises ReplearnError if the tensor can't be divided into heads.

    >>> attention_short(torch.randn(2, 17, 3 * 4 * 16), heads=4).shape
    torch.Size([2, 17, 64])
    """
    if qkv.dim() != 3 or heads < 1 or qkv.shape[2] % (3 * heads):
        raise ReplearnError(
            f"attention_short: {tuple(qkv.shape)} is not (batch, tokens, 3 x {heads} heads x width). Give it "
            "queries, keys and values as one linear layer makes them: qkv(x), not yet divided into heads."
        )
    if fits(qkv, heads):
        made: Tensor = torch.ops.replearn.attention_short(qkv.to(compute_dtype(qkv)), heads)
        return made
    return reference(qkv, heads)


def reference(qkv: Tensor, heads: int) -> Tensor:
    batch, tokens, packed = qkv.shape
    width = packed // (3 * heads)
    q, k, v = qkv.reshape(batch, tokens, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    made = scaled_dot_product_attention(q, k, v)
    return made.transpose(1, 2).reshape(batch, tokens, heads * width)


def fits(qkv: Tensor, heads: int) -> bool:
    """True if the kernels compute this call."""
    return kernel_takes(qkv, heads, qkv.shape[2] // (3 * heads))


def examples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments that the kernels take, for tests."""
    if dtype in HALF:
        for tokens, width in ((5, 64), (17, 16), (64, 64)):
            yield torch.randn(2, tokens, 3 * 2 * width, device=device, dtype=dtype), 2
        yield torch.randn(1, 5, 3 * 32, device=device), 1  # under autocast


def kernel_takes(x: Tensor, heads: int, width: int) -> bool:
    """True if the kernels compute attention over the tokens of x, (batch, tokens, anything), with such heads."""
    if not triton_runs_on(x.device) or in_transform():
        return False
    if x.dim() != 3 or compute_dtype(x) not in HALF or not x.is_floating_point() or x.dtype is torch.float64:
        return False
    # the kernels have 32-bit offsets, and the second part of a grid has 16 bits
    small = 0 < x.shape[0] * x.shape[1] * 3 * heads * width < 2**31 and heads < 2**16
    return small and x.shape[1] <= MOST_TOKENS and width in WIDTHS


@torch.library.custom_op("replearn::attention_short", mutates_args=())
def _launch(qkv: Tensor, heads: int) -> Tensor:
    from ._triton.attention_short import attend_kernel, launch

    out: Tensor = _fake(qkv, heads)
    launch(attend_kernel, (qkv.contiguous(), out), heads, tile_for(FORWARD, qkv.shape[1]))
    return out


@torch.library.custom_op("replearn::attention_short_backward", mutates_args=())
def _launch_backward(qkv: Tensor, grad: Tensor, heads: int) -> Tensor:
    from ._triton.attention_short import attend_back_kernel, launch

    out = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    given = qkv.contiguous(), grad.contiguous(), out
    launch(attend_back_kernel, given, heads, tile_for(BACKWARD, qkv.shape[1]))
    return out


@_launch.register_fake
def _fake(qkv: Tensor, heads: int) -> Tensor:
    return qkv.new_empty((*qkv.shape[:2], qkv.shape[2] // 3))


@_launch_backward.register_fake
def _(qkv: Tensor, grad: Tensor, heads: int) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    qkv, ctx.heads = inputs
    ctx.save_for_backward(qkv)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (qkv,) = ctx.saved_tensors
    return torch.ops.replearn.attention_short_backward(qkv, grad, ctx.heads), None


_launch.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.replearn.attention_short, get_raw=True)
def _flops(qkv: Tensor, heads: int, out_val: Any = None) -> int:
    return 4 * qkv.numel() // 3 * qkv.shape[1]


@register_flop_formula(torch.ops.replearn.attention_short_backward, get_raw=True)
def _flops_backward(qkv: Tensor, grad: Tensor, heads: int, out_val: Any = None) -> int:
    return 10 * grad.numel() * qkv.shape[1]  # as torch counts fused attention: the scores are computed again
