"""The door `fused_norms`: a model's BatchNorms with the sums and ReLUs after them, while it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..exchanging import exchanged, find_exactly
from .operation import FusedBatchNorm2d
from .rewriting import Rewritten

Forward = Callable[..., Any]
_known: WeakKeyDictionary[nn.Module, Rewritten] = WeakKeyDictionary()


@contextmanager
def fused_norms(model: nn.Module) -> Iterator[None]:
    """Inside, a BatchNorm in train mode and the ReLU after it are computed by Triton kernels, as one.

    The sum with the residual that a block ends in goes with them. The kernels take channels_last tensors on a GPU;
    what is called with anything else is computed as ever, and so are layers with hooks, and code that torch.fx
    can't trace. Results agree to rounding; gradients of gradients are not known. Enter it around forward *and*
    backward pass: a block that is recomputed must compute what it did before. It may stay entered for all of the
    training, but a model is not to be pickled, compiled or operated on inside. Launching takes more of Python's
    time than torch's own layers do, so it pays in a step that is captured as a CUDA graph.

    >>> import torch
    >>> import replearn
    >>> model = replearn.models.resnet32().to(memory_format=torch.channels_last)
    >>> images = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    >>> with replearn.fused_norms(model), torch.autocast("cpu", torch.bfloat16):
    ...     model(images).sum().backward()
    >>> type(model.bn1) is torch.nn.BatchNorm2d
    True
    """
    norms = list(find_exactly(model, nn.BatchNorm2d))
    found = [(module, fused.forward) for module, fused in find_fused(model) if fused.forward is not None]
    with exchanged(norms, nn.BatchNorm2d, FusedBatchNorm2d), replaced(found):
        yield


def num_fused(model: nn.Module) -> int:
    """How many norms in the code of a model's modules go with the ReLU after them, operators' own not counted."""
    return sum(fused.norms for _, fused in find_fused(model))


def find_fused(model: nn.Module) -> Iterator[tuple[nn.Module, Rewritten]]:
    """The modules that have norms of their own, and what their code was rewritten to."""
    for module in model.modules():
        owns = any(type(child) is nn.BatchNorm2d for child in module._modules.values())
        if owns and "forward" not in vars(module):
            found = _known.get(module)
            if found is None or not found.holds_for(module):
                found = _known[module] = Rewritten.of(module)
            yield module, found


@contextmanager
def replaced(found: list[tuple[nn.Module, Forward]]) -> Iterator[None]:
    """Inside, these modules run other code; layers are found and called in them as ever."""
    try:
        for module, forward in found:
            vars(module)["forward"] = MethodType(forward, module)
        yield
    finally:
        for module, _ in found:
            vars(module).pop("forward", None)
