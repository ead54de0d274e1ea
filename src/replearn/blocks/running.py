"""Run a model on a batch, and leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model as users write a batch: a tuple of arguments, a dict of keywords, or the one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def size_of(inputs: Any) -> int:
    """The number of samples: the length of the first tensor."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim():
            return len(leaf)
    return 1


def cut(inputs: Any, size: int, begin: int, end: int) -> Any:
    """Some samples of a batch: rows of every tensor that has one for each sample."""
    return tree_map(
        lambda leaf: leaf[begin:end] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size else leaf,
        inputs,
    )


def differentiable_attention() -> AbstractContextManager[Any]:
    """Attention as plain arithmetic: the fused kernels have no forward-mode and no second derivatives."""
    return sdpa_kernel(SDPBackend.MATH)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; afterwards modes, buffers and the random state are as before."""
    modes = {module: module.training for module in model.modules()}
    buffers = {module: dict(module._buffers) for module in model.modules()}
    values = {buffer: buffer.clone() for buffer in model.buffers() if not buffer.is_meta}
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    for module in modes:  # not model.eval(), which some models override to freeze parameters too
        module.training = False
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
            module._buffers.update(buffers[module])
        with torch.no_grad():
            for buffer, value in values.items():
                if not torch.equal(buffer, value):  # most models change none
                    buffer.copy_(value)
