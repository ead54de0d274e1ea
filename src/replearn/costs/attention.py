"""Scaled dot-product attention as a CUDA GPU runs it, decided by shapes and dtypes alone.

torch asks the GPU at hand which kernel fits. There may be none here, so the usual choice is written down: flash
attention for 16-bit inputs without a mask, memory-efficient attention for the rest, the plain formula where
neither fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

HALF = (torch.float16, torch.bfloat16)
LARGEST_FLASH_HEAD = 256


class FusedAttention(TorchFunctionMode):
    """While active, attention on the fake GPU goes to the kernel that CUDA would pick."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is scaled_dot_product_attention:
            return attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with the kernel chosen here."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (t.to(dtype) if t.dtype is torch.float32 else t for t in (query, key, value))
        if attn_mask is not None and attn_mask.dtype is torch.float32:
            attn_mask = attn_mask.to(dtype)
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    width = query.shape[-1]
    aligned = width % (8 if query.dtype in HALF else 4) == 0 and value.shape[-1] == width
    four = query.dim() == 4 and key.dim() == 4
    if four and query.dtype in HALF and attn_mask is None and width <= LARGEST_FLASH_HEAD:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if four and aligned and query.dtype in (*HALF, torch.float32):
        if attn_mask is not None:
            attn_mask = _as_bias(attn_mask, query, key)
        wants_grad = query.requires_grad or key.requires_grad or value.requires_grad
        made: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, wants_grad, dropout_p, is_causal, scale=scale
        )[0]
        return made
    plain: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )[0]
    return plain


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, scale: float | None) -> Tensor:
    """Heads are padded to a multiple of 8, as the kernel wants them."""
    width = q.shape[-1]
    if width % 8:
        scale = scale or width**-0.5
        q, k, v = (pad(t, (0, 8 - width % 8)) for t in (q, k, v))
    made: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)[0]
    return made[..., :width]


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask as the kernel takes it: a number per pair, rows aligned to 16."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask.logical_not(), float("-inf"))
    if mask.shape[-1] % 16:
        mask = pad(mask, (0, 16 - mask.shape[-1] % 16))[..., : mask.shape[-1]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
