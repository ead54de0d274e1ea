"""BatchNorms of a model with the residual sums and ReLUs after them by `kernels.bn_add_relu`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

from torch import nn

from ..kernels._dispatch import triton_runs_on
from ..kernels.bn_add_relu import FusedBatchNorm2d, counters_of
from .class_patching import modules_of, patched_class, reduce_as
from .known_blocks import Method, fused_method_of, fused_sequential


@contextmanager
def fused_norms(model: nn.Module) -> Iterator[None]:
    """Inside, a BatchNorm in train mode and the ReLU after it are one operation, the residual sum included.

    That is so in the ResNets of torchvision, timm and ours, in any nn.Sequential, and in operators. Layers with
    hooks are left to torch. In a captured step the gradient of a block's output comes in two parts: hooks on it
    see all of it if they were registered before the next block runs; `retain_grad` later on sees one part.
    """
    norms = modules_of(model, nn.BatchNorm2d)
    for norm in norms:
        if norm.weight is not None and triton_runs_on(norm.weight.device):
            counters_of(norm, norm.weight.device)  # allocated before a capture
    with ExitStack() as stack:
        for modules, before, after in patches(model):
            stack.enter_context(patched_class(modules, before, after))
        stack.enter_context(patched_class(norms, nn.BatchNorm2d, FusedBatchNorm2d))
        yield


def num_fused(model: nn.Module) -> int:
    """How many norms of a model's blocks are fused with a ReLU; operators' own are not counted."""
    known = [module for modules, before, _ in patches(model) if before is not nn.Sequential for module in modules]
    alone = sum(type(child) is nn.BatchNorm2d for module in known for child in module._modules.values())
    return alone + sum(num_pairs(module) for module in model.modules() if type(module) is nn.Sequential)


def patches(model: nn.Module) -> Iterator[tuple[list[nn.Module], type[nn.Module], type[nn.Module]]]:
    """Modules of a class, that class, and its fused subclass."""
    found: dict[Any, list[nn.Module]] = {}
    for module in model.modules():
        found.setdefault(type(module), []).append(module)
    for original, modules in found.items():
        if original is nn.Sequential:
            modules = [module for module in modules if num_pairs(module)]
            yield modules, original, fused_class(original, "forward", fused_sequential)
        elif (method := fused_method_of(original)) is not None:
            yield modules, original, fused_class(original, *method)


def num_pairs(module: nn.Module) -> int:
    """How often a ReLU follows a BatchNorm in a sequence."""
    kinds = [type(child) for child in module._modules.values()]
    return sum(pair == (nn.BatchNorm2d, nn.ReLU) for pair in pairwise(kinds))


@cache
def fused_class(original: Any, method: str, fused: Method) -> type[nn.Module]:
    """A subclass with one method replaced; copies and pickles of its modules are of the original class."""
    return type(f"Fused{original.__name__}", (original,), {method: fused, "__reduce_ex__": reduce_as(original)})
