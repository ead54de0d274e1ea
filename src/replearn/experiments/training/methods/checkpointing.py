"""Activation checkpointing (Chen et al. 2016), non-reentrant, around every block of every stack.

Of a block only the input is stored; it is run again in the backward pass. The second run draws the same random
numbers and does not update BatchNorm's running statistics, so that training is that of E2E.
"""

from typing import Any

from torch import nn

from ....blocks.stacks import Stack
from ....operators._base.checkpointing import checkpointed
from .wrapping import Patch, Wrapper, is_removed, unpatch_


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
    """Stores only the block's inputs, and runs it again for the backward pass."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training:
            return self.run(*args, **kwargs)
        return checkpointed(self.run, [self.module], *args, **kwargs)
