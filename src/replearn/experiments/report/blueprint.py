"""The blocks of a model by its name, built without weights and without drawing any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...blocks.stacks import find_stacks
from ...errors import ReplearnError
from ..training.architectures import architecture


class NoDraws(TorchFunctionMode):
    """Leaves out random starting values: on the meta device they load the compiler, which takes seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "erfinv_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Block:
    name: str
    position: int  # 1-based in its stack
    parameters: int | None


@lru_cache(maxsize=64)
def blocks_of(model: str, classes: int = 10) -> Mapping[str, tuple[Block, ...]] | None:
    """Every block of a model by stack, built without weights; None where the model can't be built here."""
    for size in (32, 224):
        try:
            with torch.device("meta"), NoDraws():
                built = architecture(model, num_classes=classes, size=size)
            return {
                stack.name: tuple(
                    Block(name, position, sum(p.numel() for p in built.get_submodule(name).parameters()))
                    for position, name in enumerate(stack.blocks, start=1)
                )
                for stack in find_stacks(built)
            }
        except (ReplearnError, NotImplementedError, RuntimeError, ImportError):
            continue
    return None
