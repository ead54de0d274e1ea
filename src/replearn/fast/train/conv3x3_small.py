"""The door `narrow_convolutions`: a model's convolutions by our kernels, for as long as a step takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from ..kernels._triton.conv3x3_small_tiles import is_narrow_between
from ..kernels.conv3x3_small import conv2d
from .class_patching import exchanged, find_exactly


class NarrowConv2d(nn.Conv2d):
    """A convolution as it is seen inside `narrow_convolutions`; outside there are none."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return conv2d(input, weight)
        made: Tensor = super()._conv_forward(input, weight, bias)
        return made


@contextmanager
def narrow_convolutions(model: nn.Module) -> Iterator[None]:
    """Inside, narrow 3x3 convolutions of a model are computed by Triton kernels instead of cuDNN's.

    Those are convolutions with 16 or 32 channels on each side, stride 1 and padding 1, without groups and
    bias. The kernels take channels_last tensors in bfloat16 or float16 (autocast) on a GPU; what is called with
    anything else is computed as ever. Results agree to rounding. Enter it around forward *and* backward pass: a
    block that is recomputed must compute what it did before. Launching takes more of Python's time than cuDNN
    does, so it pays in a step that is captured as a CUDA graph, or compiled.

    >>> import torch
    >>> import replearn
    >>> model = replearn.models.resnet32().to(memory_format=torch.channels_last)
    >>> images = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    >>> with replearn.fast.narrow_convolutions(model), torch.autocast("cpu", torch.bfloat16):
    ...     model(images).sum().backward()
    >>> type(model.conv1) is torch.nn.Conv2d
    True
    """
    with exchanged(find_narrow(model), nn.Conv2d, NarrowConv2d):
        yield


def find_narrow(model: nn.Module) -> list[nn.Conv2d]:
    """The convolutions of a model that our kernels can compute."""
    return [conv for conv in find_exactly(model, nn.Conv2d) if is_narrow(conv)]


def is_narrow(conv: nn.Conv2d) -> bool:
    return (
        is_narrow_between(conv.in_channels, conv.out_channels)
        and conv.kernel_size == (3, 3)
        and conv.stride == (1, 1)
        and conv.padding in ((1, 1), "same")
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.padding_mode == "zeros"
        and conv.bias is None
    )
