"""Attention over few tokens as torch operations: forward, gradient, shapes alone, and which tensors fit.

    Y = P V,   P = softmax(Q K' / sqrt(d)),
    dV = P' dY,   dS = P o (dP - rowsum(P o dP)) with dP = dY V',   dQ = dS K / sqrt(d),   dK = dS' Q / sqrt(d)

Queries, keys and values come as one tensor, as one linear layer makes them, and so does their gradient: neither is
permuted, copied or stacked. Softmax is computed in float32. All that is kept for the backward pass is that tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...errors import ReplearnError
from ._transforms import transformed
from ._triton.attention_short_tiles import BACKWARD, FORWARD, MOST_TOKENS, WIDTHS, tile_for
from .conv3x3_small import computed_dtype, kernels_run_on

_DTYPES = (torch.bfloat16, torch.float16)


def packed_attention(qkv: Tensor, heads: int, *, causal: bool = False) -> Tensor:
    """Attention of (batch, tokens, 3 heads width) to (batch, tokens, heads width): by our kernels, or by torch.

    The kernels take 64 tokens at most and heads 16, 32, 64 or 128 wide, in bfloat16 or float16, by their own dtype
    or under autocast, on a GPU with Triton. ReplearnError if the tensor can't be cut into heads.

    >>> packed_attention(torch.randn(2, 17, 3 * 4 * 16), heads=4).shape
    torch.Size([2, 17, 64])
    """
    if qkv.dim() != 3 or heads < 1 or qkv.shape[2] % (3 * heads):
        raise ReplearnError(
            f"packed_attention: {tuple(qkv.shape)} is not (batch, tokens, 3 x {heads} heads x width). Give it "
            "queries, keys and values as one linear layer makes them: qkv(x), not yet cut into heads."
        )
    width = qkv.shape[2] // (3 * heads)
    if kernels_take(qkv, heads, width):
        made: Tensor = torch.ops.replearn.short_attention(qkv.to(computed_dtype(qkv)), heads, causal)
        return made
    batch, tokens, _ = qkv.shape
    q, k, v = qkv.reshape(batch, tokens, 3, heads, width).permute(2, 0, 3, 1, 4).unbind(0)
    made = scaled_dot_product_attention(q, k, v, is_causal=causal)
    return made.transpose(1, 2).reshape(batch, tokens, heads * width)


def kernels_take(x: Tensor, heads: int, width: int) -> bool:
    """Whether our kernels compute attention over the tokens of x, here and now: (batch, tokens, anything)."""
    return kernels_run_on(x.device) and not transformed() and fits(x, heads, width)


def fits(x: Tensor, heads: int, width: int) -> bool:
    """Whether our kernels compute attention over these tokens, where they run."""
    if x.dim() != 3 or computed_dtype(x) not in _DTYPES or not x.is_floating_point() or x.dtype is torch.float64:
        return False
    # offsets are 32-bit numbers in the kernels, and the second part of a grid has 16 bits
    small = 0 < x.shape[0] * x.shape[1] * 3 * heads * width < 2**31 and heads < 2**16
    return small and x.shape[1] <= MOST_TOKENS and width in WIDTHS


@torch.library.custom_op("replearn::short_attention", mutates_args=())
def attend(qkv: Tensor, heads: int, causal: bool) -> Tensor:
    from ._triton.attention_short import launch_attend

    out: Tensor = empty_result(qkv, heads, causal)
    tile = tile_for(FORWARD, qkv.shape[1], qkv.shape[2] // (3 * heads))
    launch_attend(qkv.contiguous(), out, heads, causal, tile)
    return out


@torch.library.custom_op("replearn::short_attention_back", mutates_args=())
def attend_back(qkv: Tensor, grad: Tensor, heads: int, causal: bool) -> Tensor:
    from ._triton.attention_short import launch_attend_back

    out: Tensor = empty_gradient(qkv, grad, heads, causal)
    tile = tile_for(BACKWARD, qkv.shape[1], qkv.shape[2] // (3 * heads))
    launch_attend_back(qkv.contiguous(), grad.contiguous(), out, heads, causal, tile)
    return out


@attend.register_fake
def empty_result(qkv: Tensor, heads: int, causal: bool) -> Tensor:
    batch, tokens, packed = qkv.shape
    return qkv.new_empty((batch, tokens, packed // 3))


@attend_back.register_fake
def empty_gradient(qkv: Tensor, grad: Tensor, heads: int, causal: bool) -> Tensor:
    return qkv.new_empty(qkv.shape)


def remember(ctx: Any, inputs: tuple[Tensor, int, bool], output: Tensor) -> None:
    qkv, ctx.heads, ctx.causal = inputs
    ctx.save_for_backward(qkv)


def differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (qkv,) = ctx.saved_tensors
    return torch.ops.replearn.short_attention_back(qkv, grad, ctx.heads, ctx.causal), None, None


attend.register_autograd(differentiate, setup_context=remember)
