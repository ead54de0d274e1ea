"""The door `fused_norms`: a model's BatchNorms with the sums and ReLUs after them, while it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

from torch import nn

from ..kernels.bn_add_relu import FusedBatchNorm2d, arrivals_of
from ..kernels.conv3x3_small import kernels_run_on
from .class_patching import exchanged, find_exactly, plain_copies
from .known_blocks import KNOWN, Method, sequence


@contextmanager
def fused_norms(model: nn.Module) -> Iterator[None]:
    """Inside, a BatchNorm in train mode and the ReLU after it are computed by Triton kernels, as one.

    The sum with the residual that a block ends in goes with them. So it is in the ResNets of torchvision, timm and
    ours, in any nn.Sequential where one follows the other, and in operators; for code of your own there is
    `operators.functional.norm_add_act`. The kernels take channels_last tensors on a GPU; what is called with
    anything else is computed by torch, and so are layers with hooks. Results agree to rounding; they have no
    second derivatives.

    Enter it around forward *and* backward pass: a block that is recomputed must compute what it did before. It may
    stay entered, but a model is not to be compiled or operated on inside. Launching takes more of Python's time
    than torch's own layers do, so it pays in a step that is captured as a CUDA graph. In such a step the gradient
    of a block's output comes in two parts: hooks on it see all of it if they are there before the next block runs,
    and whoever asks later (`retain_grad`, `torch.autograd.grad`) one part.

    >>> import torch
    >>> import replearn
    >>> model = replearn.models.resnet32().to(memory_format=torch.channels_last)
    >>> images = torch.randn(2, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    >>> with replearn.fast.fused_norms(model), torch.autocast("cpu", torch.bfloat16):
    ...     model(images).sum().backward()
    >>> type(model.bn1) is torch.nn.BatchNorm2d
    True
    """
    norms = list(find_exactly(model, nn.BatchNorm2d))
    for norm in norms:
        if norm.weight is not None and kernels_run_on(norm.weight.device):
            arrivals_of(norm, norm.weight.device)  # not for the first time while a graph is recorded
    with ExitStack() as stack:
        for modules, before, after in changes(model):
            stack.enter_context(exchanged(modules, before, after))
        stack.enter_context(exchanged(norms, nn.BatchNorm2d, FusedBatchNorm2d))
        yield


def num_fused(model: nn.Module) -> int:
    """How many norms of a model's blocks can go with the ReLU after them; operators' own are not counted."""
    known = [module for modules, before, _ in changes(model) if before is not nn.Sequential for module in modules]
    alone = sum(type(child) is nn.BatchNorm2d for module in known for child in module._modules.values())
    return alone + sum(num_pairs(module) for module in model.modules() if type(module) is nn.Sequential)


def changes(model: nn.Module) -> Iterator[tuple[list[nn.Module], type[nn.Module], type[nn.Module]]]:
    """Modules of a class, that class, and the one that they are of meanwhile."""
    found: dict[Any, list[nn.Module]] = {}
    for module in model.modules():
        found.setdefault(type(module), []).append(module)
    for kind, modules in found.items():
        if kind is nn.Sequential:
            modules = [module for module in modules if num_pairs(module)]
            yield modules, kind, fused_class(kind, "forward", sequence)
        else:
            for known in KNOWN:
                if known.tells_of(kind):
                    yield modules, kind, fused_class(kind, known.method, known.fused)


def num_pairs(module: nn.Module) -> int:
    """How often a ReLU follows a norm in a sequence."""
    kinds = [type(child) for child in module._modules.values()]
    return sum(pair == (nn.BatchNorm2d, nn.ReLU) for pair in pairwise(kinds))


@cache
def fused_class(kind: Any, method: str, fused: Method) -> type[nn.Module]:
    """A class with one method of ours; copies and pickles of its modules are of the class itself."""
    return type(f"Fused{kind.__name__}", (kind,), {method: fused, "__reduce_ex__": plain_copies(kind)})
