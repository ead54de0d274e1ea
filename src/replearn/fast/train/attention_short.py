"""Attention of timm's transformers over few tokens by `kernels.attention_short`."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from torch import Tensor, nn

from ..kernels._triton.attention_short_tiles import WIDTHS
from ..kernels.attention_short import attention_short, kernel_takes
from .class_patching import modules_of, patched_class, reduce_as

PARTS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}  # of timm's, without its gate


def short_attention(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, timm's plain `Attention` over 64 tokens or fewer runs on Triton kernels in half precision."""
    original: Any = timm_attention()
    if original is None:
        return nullcontext()
    return patched_class(find_attention(model), original, short_class(original))


def find_attention(model: nn.Module) -> list[nn.Module]:
    """The attention layers of a model that the kernels can compute."""
    original = timm_attention()
    return [] if original is None else [layer for layer in modules_of(model, original) if is_plain(layer)]


def timm_attention() -> type[nn.Module] | None:
    """timm's attention class, if timm is imported, as it is wherever there is a model of timm's."""
    found: type[nn.Module] | None = getattr(sys.modules.get("timm.models.vision_transformer"), "Attention", None)
    return found


def is_plain(attention: Any) -> bool:
    """True if between qkv and proj there is only scaled attention and a norm of its result."""
    if {name for name, module in attention._modules.items() if module is not None} != PARTS:
        return False
    no_norms = type(attention.q_norm) is nn.Identity and type(attention.k_norm) is nn.Identity
    return bool(no_norms and attention.head_dim in WIDTHS and attention.fused_attn)


@cache
def short_class(original: Any) -> type[nn.Module]:
    class ShortAttention(original):  # type: ignore[misc]
        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            drops = self.training and self.attn_drop.p > 0
            if attn_mask is not None or drops or not kernel_takes(x, self.num_heads, self.head_dim):
                later = {"is_causal": True} if is_causal else {}  # older versions have no such argument
                plain: Tensor = super().forward(x, attn_mask=attn_mask, **later)
                return plain
            made = attention_short(self.qkv(x), self.num_heads, causal=is_causal)
            result: Tensor = self.proj_drop(self.proj(self.norm(made)))
            return result

        __reduce_ex__ = reduce_as(original)

    return ShortAttention
