"""Attention over at most 64 tokens, for training in half precision.

    Y = P V,   P = softmax(Q K' / sqrt(d)),
    dV = P' dY,   dS = P o (dP - rowsum(P o dP)) with dP = dY V',   dQ = dS K / sqrt(d),   dK = dS' Q / sqrt(d)

Queries, keys and values are one tensor, as one linear layer makes them, and so is their gradient: nothing is
permuted, copied or stacked, and nothing else is kept for the backward pass. Softmax is in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import register_flop_formula

from ...errors import ReplearnError
from ._dispatch import HALF, compute_dtype, in_transform, triton_runs_on
from ._triton.attention_short_tiles import BACKWARD, FORWARD, MOST_TOKENS, WIDTHS, tile_for


def attention_short(qkv: Tensor, heads: int, *, causal: bool = False) -> Tensor:
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
    if fits(qkv, heads, causal=causal):
        made: Tensor = torch.ops.replearn.attention_short(qkv.to(compute_dtype(qkv)), heads, causal)
        return made
    return reference(qkv, heads, causal=causal)


def reference(qkv: Tensor, heads: int, *, causal: bool = False) -> Tensor:
    batch, tokens, packed = qkv.shape
    width = packed // (3 * heads)
    q, k, v = qkv.reshape(batch, tokens, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    made = scaled_dot_product_attention(q, k, v, is_causal=causal)
    return made.transpose(1, 2).reshape(batch, tokens, heads * width)


def fits(qkv: Tensor, heads: int, *, causal: bool = False) -> bool:
    """True if the kernels compute this call."""
    return kernel_takes(qkv, heads, qkv.shape[2] // (3 * heads))


def examples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments that the kernels take, for tests."""
    if dtype in HALF:
        yield torch.randn(2, 17, 3 * 2 * 16, device=device, dtype=dtype), 2
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
def _launch(qkv: Tensor, heads: int, causal: bool) -> Tensor:
    from ._triton.attention_short import launch_attend

    out: Tensor = _fake(qkv, heads, causal)
    tile = tile_for(FORWARD, qkv.shape[1], qkv.shape[2] // (3 * heads))
    launch_attend(qkv.contiguous(), out, heads, causal, tile)
    return out


@torch.library.custom_op("replearn::attention_short_backward", mutates_args=())
def _launch_backward(qkv: Tensor, grad: Tensor, heads: int, causal: bool) -> Tensor:
    from ._triton.attention_short import launch_attend_back

    out: Tensor = _fake_backward(qkv, grad, heads, causal)
    tile = tile_for(BACKWARD, qkv.shape[1], qkv.shape[2] // (3 * heads))
    launch_attend_back(qkv.contiguous(), grad.contiguous(), out, heads, causal, tile)
    return out


@_launch.register_fake
def _fake(qkv: Tensor, heads: int, causal: bool) -> Tensor:
    batch, tokens, packed = qkv.shape
    return qkv.new_empty((batch, tokens, packed // 3))


@_launch_backward.register_fake
def _fake_backward(qkv: Tensor, grad: Tensor, heads: int, causal: bool) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, int, bool], output: Tensor) -> None:
    qkv, ctx.heads, ctx.causal = inputs
    ctx.save_for_backward(qkv)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (qkv,) = ctx.saved_tensors
    return torch.ops.replearn.attention_short_backward(qkv, grad, ctx.heads, ctx.causal), None, None


_launch.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.replearn.attention_short, get_raw=True)
def _flops(qkv: Tensor, heads: int, causal: bool, out_val: Any = None) -> int:
    return 4 * qkv.numel() // 3 * qkv.shape[1]


@register_flop_formula(torch.ops.replearn.attention_short_backward, get_raw=True)
def _flops_backward(qkv: Tensor, grad: Tensor, heads: int, causal: bool, out_val: Any = None) -> int:
    return 10 * grad.numel() * qkv.shape[1]  # as torch counts fused attention: the scores are computed again
