"""The door `short_attention`: the attention of a timm model by our kernels, for as long as a step takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

from torch import Tensor, nn

from ..kernels._triton.attention_short_tiles import WIDTHS
from ..kernels.attention_short import kernels_take, packed_attention
from .class_patching import exchanged, find_exactly, plain_copies

PARTS = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}  # of timm's, without its gate


@contextmanager
def short_attention(model: nn.Module) -> Iterator[None]:
    """Inside, attention over 64 tokens or fewer is computed by Triton kernels in timm's transformers.

    That is timm's plain `Attention`, with heads 16, 32, 64 or 128 wide and no norms of queries and keys. The
    kernels run in bfloat16 or float16 (autocast) on a GPU; what is called with anything else, with more tokens,
    with a mask or with dropout of the attention is computed as ever. Results agree to rounding. Enter it around
    forward *and* backward pass: a block that is recomputed must compute what it did before. Launching takes more
    of Python's time than torch's own attention does, so it pays in a step that is captured as a CUDA graph, or
    compiled.

    >>> import torch
    >>> import replearn
    >>> from timm.models.vision_transformer import Attention, VisionTransformer
    >>> model = VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=3, num_heads=4)
    >>> with replearn.fast.short_attention(model), torch.autocast("cpu", torch.bfloat16):
    ...     model(torch.randn(2, 3, 32, 32)).sum().backward()
    >>> type(model.blocks[0].attn) is Attention
    True
    """
    kind: Any = timm_attention()
    with nullcontext() if kind is None else exchanged(find_short(model), kind, short_class(kind)):
        yield


def find_short(model: nn.Module) -> list[nn.Module]:
    """The attention layers of a model that our kernels can compute, where they see few tokens."""
    kind = timm_attention()
    return [] if kind is None else [layer for layer in find_exactly(model, kind) if is_plain(layer)]


def timm_attention() -> type[nn.Module] | None:
    """The class of timm's attention; nobody has a model of timm's who has not imported it."""
    kind: type[nn.Module] | None = getattr(sys.modules.get("timm.models.vision_transformer"), "Attention", None)
    return kind


def is_plain(attention: Any) -> bool:
    """Whether nothing happens between qkv and proj but attention, scaled as usual, and a norm of its result."""
    if {name for name, module in attention._modules.items() if module is not None} != PARTS:
        return False
    idle = type(attention.q_norm) is nn.Identity and type(attention.k_norm) is nn.Identity
    return bool(idle and attention.head_dim in WIDTHS and attention.fused_attn)


@cache
def short_class(kind: Any) -> type[nn.Module]:
    """timm's attention as it is seen inside `short_attention`; outside there are none."""

    class ShortAttention(kind):  # type: ignore[misc]
        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            drops = self.training and self.attn_drop.p > 0
            if attn_mask is not None or drops or not kernels_take(x, self.num_heads, self.head_dim):
                later = {"is_causal": True} if is_causal else {}  # older ones have no such argument
                usual: Tensor = super().forward(x, attn_mask=attn_mask, **later)
                return usual
            made = packed_attention(self.qkv(x), self.num_heads, causal=is_causal)
            result: Tensor = self.proj_drop(self.proj(self.norm(made)))
            return result

        __reduce_ex__ = plain_copies(kind)

    return ShortAttention
