"""Run an operator again in the backward pass instead of keeping its activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recomputed(run: Callable[..., Any], module: nn.Module, *args: Any, draws: bool = False, **kwargs: Any) -> Any:
    """Call `run`, keep its inputs alone, and call it again for the backward pass.

    The second call leaves the module's running statistics as they are. `draws` says that it draws random numbers,
    which are then drawn alike.
    """
    if torch.compiler.is_compiling():  # the compiler updates statistics once, and takes no contexts
        return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=draws, **kwargs)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), held_statistics(module.modules())

    return checkpoint(run, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=draws, **kwargs)


@contextmanager
def held_statistics(layers: Iterator[nn.Module]) -> Iterator[None]:
    """Let BatchNorm layers compute as in training, and leave their running statistics as they are."""
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
