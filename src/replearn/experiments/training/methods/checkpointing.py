"""Activation checkpointing (Chen et al. 2016), non-reentrant, around every block of every stack.

A block keeps its input alone and is run again in the backward pass. The second run draws the same
random numbers and leaves BatchNorm's running statistics alone, so that training is that of E2E.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ....blocks.stacks import Stack
from ....operators._base.recompute import held_statistics
from .wrapping import Patch, Wrapper, branches, is_removed, unpatch_


class Checkpointing(Wrapper):
    name = "checkpointing"

    def wrap(self, model: nn.Module, stacks: tuple[Stack, ...]) -> nn.Module:
        for name in (name for stack in stacks for name in stack.blocks):
            block = model.get_submodule(name)
            if not is_removed(block):
                Recomputed(block)
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        unpatch_(model, Recomputed)
        return model


class Recomputed(Patch):
    """Keeps the block's inputs alone, and runs it again for the backward pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (self.module.training and torch.is_grad_enabled()):
            return self.run(*args, **kwargs)
        if torch.compiler.is_compiling():  # the compiler updates statistics once, and takes no contexts
            return checkpoint(self.run, *args, use_reentrant=False, **kwargs)
        return checkpoint(self.run, *args, use_reentrant=False, context_fn=self.contexts, **kwargs)

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """What surrounds the first run, and the second."""
        layers = (layer for branch in branches(self.module) for layer in branch.modules())
        return nullcontext(), held_statistics(layers)
