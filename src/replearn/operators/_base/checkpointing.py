"""Activation checkpointing that does not update running statistics in the recomputation."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpointed(run: Callable[..., Any], parts: Sequence[nn.Module], *args: Any, **kwargs: Any) -> Any:
    """Call `run` without storing its activations, and call it again in the backward pass.

    The second call draws the same random numbers and does not update the running statistics of `parts`.
    """
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    if torch.compiler.is_compiling():  # the compiler updates statistics once, and takes no contexts
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), frozen_statistics(parts)

    return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def frozen_statistics(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, BatchNorms normalise by the batch as in training, and do not update their running statistics."""
    layers = (layer for part in parts for layer in part.modules())
    norms = [layer for layer in layers if isinstance(layer, nn.modules.batchnorm._NormBase)]
    before = [(layer.momentum, layer._buffers.get("num_batches_tracked")) for layer in norms]
    for layer in norms:
        layer.momentum = 0.0  # not track_running_stats: that would change which tensors are saved
        layer._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for layer, (momentum, batches) in zip(norms, before, strict=True):
            layer.momentum = momentum
            layer._buffers["num_batches_tracked"] = batches
