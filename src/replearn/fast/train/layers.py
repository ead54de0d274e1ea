"""Layers on Triton kernels inside `accelerate`: small convolutions, short attention, BatchNorms with ReLUs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ..kernels._dispatch import triton_runs_on
from ..kernels.attention_short import WIDTHS, attention_short, kernel_takes
from ..kernels.bn_add_relu import FusedBatchNorm2d, counters_of
from ..kernels.conv3x3_small import conv3x3_small, fits, has_tile
from .class_patching import patched_class, reduce_as
from .known_blocks import fused_method_of, fused_sequential, is_plain
from .overlapped_wgrad import OverlappedConv2d

ATTENTION = {"qkv", "q_norm", "k_norm", "attn_drop", "norm", "proj", "proj_drop"}  # without a gate


class SmallConv2d(OverlappedConv2d):
    """nn.Conv2d inside `accelerate`, on Triton kernels where they take its input."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return conv3x3_small(input, weight) if fits(input, weight) else super()._conv_forward(input, weight, bias)


def small_convolutions(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, 3x3 convolutions with 16 or 32 channels on each side run on Triton kernels in half precision."""
    small = [conv for conv in model.modules() if type(conv) is nn.Conv2d and is_small(conv)]
    return patched_class(small, nn.Conv2d, SmallConv2d)


def is_small(conv: nn.Conv2d) -> bool:
    return (
        has_tile(conv.in_channels, conv.out_channels)
        and (conv.kernel_size, conv.stride, conv.dilation, conv.groups) == ((3, 3), (1, 1), (1, 1), 1)
        and conv.padding in ((1, 1), "same")
        and conv.padding_mode == "zeros"
        and conv.bias is None
    )


def short_attention(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, timm's plain `Attention` over 64 tokens or fewer runs on Triton kernels in half precision."""
    original: Any = timm_attention()
    if original is None:
        return nullcontext()
    return patched_class(find_attention(model), original, short_class(original))


def find_attention(model: nn.Module) -> list[nn.Module]:
    """The attention layers of a model that the kernels can compute."""
    original = timm_attention()
    return [layer for layer in model.modules() if type(layer) is original and is_alone(layer)]


def timm_attention() -> type[nn.Module] | None:
    """timm's attention class, if timm is imported, as it is wherever there is a model of timm's."""
    return getattr(sys.modules.get("timm.models.vision_transformer"), "Attention", None)


def is_alone(attention: Any) -> bool:
    """True if between qkv and proj there is only scaled attention and a norm of its result."""
    if {name for name, module in attention._modules.items() if module is not None} != ATTENTION:
        return False
    no_norms = type(attention.q_norm) is nn.Identity and type(attention.k_norm) is nn.Identity
    return bool(no_norms and attention.head_dim in WIDTHS and attention.fused_attn)


@cache
def short_class(original: Any) -> type[nn.Module]:
    class ShortAttention(original):  # type: ignore[misc]
        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            masked = attn_mask is not None or is_causal or (self.training and self.attn_drop.p > 0)
            if masked or not kernel_takes(x, self.num_heads, self.head_dim):
                later = {"is_causal": True} if is_causal else {}  # older versions have no such argument
                return super().forward(x, attn_mask=attn_mask, **later)
            made = attention_short(self.qkv(x), self.num_heads)
            return self.proj_drop(self.proj(self.norm(made)))

        __reduce_ex__ = reduce_as(original)

    return ShortAttention


@contextmanager
def fused_norms(model: nn.Module) -> Iterator[None]:
    """Inside, a BatchNorm in train mode and the ReLU after it are one operation, the residual sum included.

    That is so in the ResNets of torchvision, timm and ours, in any nn.Sequential, and in operators. Layers with
    hooks are left to torch. In a captured step the gradient of a block's output comes in two parts: hooks on it
    see all of it if they were registered before the next block runs; `retain_grad` later on sees one part.
    """
    norms = [module for module in model.modules() if type(module) is nn.BatchNorm2d]
    for norm in norms:
        if norm.weight is not None and triton_runs_on(norm.weight.device):
            counters_of(norm, norm.weight.device)  # allocated before a capture
    with ExitStack() as stack:
        for modules, before, after in fused_blocks(model):
            stack.enter_context(patched_class(modules, before, after))
        stack.enter_context(patched_class(norms, nn.BatchNorm2d, FusedBatchNorm2d))
        yield


def fused_blocks(model: nn.Module) -> Iterator[tuple[list[nn.Module], type[nn.Module], type[nn.Module]]]:
    """Modules of a class, that class, and its subclass with a fused forward."""
    found: dict[Any, list[nn.Module]] = {}
    for module in model.modules():
        found.setdefault(type(module), []).append(module)
    for original, modules in found.items():
        if original is nn.Sequential:
            pair = nn.BatchNorm2d, nn.ReLU
            modules = [each for each in modules if pair in pairwise(map(type, each._modules.values()))]
            yield modules, original, fused_class(original, "forward", fused_sequential)
        elif (method := fused_method_of(original)) is not None:
            yield [module for module in modules if is_plain(module)], original, fused_class(original, *method)


@cache
def fused_class(original: Any, method: str, fused: Any) -> type[nn.Module]:
    """A subclass with one method replaced; copies and pickles of its modules are of the original class."""
    return type(f"Fused{original.__name__}", (original,), {method: fused, "__reduce_ex__": reduce_as(original)})
