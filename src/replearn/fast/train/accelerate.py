"""`accelerate`: the one context manager for a faster training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from ..graphs.capture import is_capturing_here
from ..synthesis.ahead import synthesized_on_demand
from .layers import fused_norms, short_attention, small_convolutions
from .overlapped_wgrad import overlapped_wgrad


@contextmanager
def accelerate(model: nn.Module) -> Iterator[None]:
    """Inside, a training step of any model runs faster, with the same results to rounding.

    Enter it around the forward and the backward pass, anew for every step; autocast goes inside. The weights of
    all operators are synthesized in one launch on a GPU. In a step that is captured as a CUDA graph, where the
    host time of a launch does not count, Triton kernels compute BatchNorm with the residual sum and the ReLU after
    it (channels_last), 3x3 convolutions with 16 or 32 channels (channels_last, half precision) and timm's
    attention over 64 tokens or fewer (half precision), and weight gradients of convolutions run on a side stream.
    Compiled models use the kernels for convolutions and attention, too. Everything else, and every call that a
    kernel does not take, is computed by torch. Do not compile a model inside; there are no second derivatives.

    >>> import replearn, torch
    >>> model = replearn.models.resnet32()
    >>> _ = replearn.replace_(model, replearn.plan(model))
    >>> with replearn.fast.accelerate(model):
    ...     model(torch.randn(2, 3, 32, 32)).sum().backward()
    """
    captured, compiled = is_capturing_here(), is_compiled(model)
    with ExitStack() as stack:
        if captured or compiled:
            stack.enter_context(small_convolutions(model))
            stack.enter_context(short_attention(model))
        if captured and not compiled:
            stack.enter_context(fused_norms(model))
            stack.enter_context(overlapped_wgrad(model))
        stack.enter_context(synthesized_on_demand(model))
        yield


def is_compiled(model: nn.Module) -> bool:
    """True if the model was compiled, or what a wrapper holds; checked at every step, so at the top alone."""
    return any(
        module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        for module in (model, *model.children())
    )
