"""Small 3x3 convolutions of a model by `kernels.conv3x3_small`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor, nn

from ..kernels._triton.conv3x3_small_tiles import has_tile
from ..kernels.conv3x3_small import conv3x3_small
from .class_patching import modules_of, patched_class


class SmallConv2d(nn.Conv2d):
    """nn.Conv2d inside `accelerate`."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return conv3x3_small(input, weight)
        made: Tensor = super()._conv_forward(input, weight, bias)
        return made


def small_convolutions(model: nn.Module) -> AbstractContextManager[None]:
    """Inside, 3x3 convolutions with 16 or 32 channels on each side run on Triton kernels in half precision."""
    return patched_class(find_small(model), nn.Conv2d, SmallConv2d)


def find_small(model: nn.Module) -> list[nn.Conv2d]:
    return [conv for conv in modules_of(model, nn.Conv2d) if is_small(conv)]


def is_small(conv: nn.Conv2d) -> bool:
    return (
        has_tile(conv.in_channels, conv.out_channels)
        and conv.kernel_size == (3, 3)
        and conv.stride == (1, 1)
        and conv.padding in ((1, 1), "same")
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
        and conv.bias is None
    )
