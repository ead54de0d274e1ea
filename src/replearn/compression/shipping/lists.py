"""The block lists of a compressed model, and the names of modules once removed blocks are left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from ...errors import ReplearnError
from ..compress import Compressed

INSTEAD = "Compress with form='removal' for a standard model, or export this one as pt2 or ONNX."


@dataclass(frozen=True, slots=True)
class BlockList:
    """An nn.ModuleList or nn.Sequential of blocks: its name, its blocks, and the indices of kept ones."""

    name: str
    blocks: tuple[str, ...]  # names
    kept: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, eq=False)
class Shortened:
    """A model without its removed blocks: the lists that get shorter, and their siblings of equal pattern."""

    model: nn.Module
    lists: tuple[BlockList, ...]
    renamed: dict[str, str]  # new names of kept blocks
    removed: tuple[str, ...]

    @property
    def changed(self) -> tuple[BlockList, ...]:
        return tuple(found for found in self.lists if len(found.kept) < found.length)

    def siblings(self, of: BlockList) -> tuple[BlockList, ...]:
        return tuple(found for found in self.lists if pattern(found.name) == pattern(of.name))

    def new_name(self, name: str) -> str | None:
        """The name of a module or a tensor in the shorter model; None for removed ones."""
        for prefix in accumulate(name.split("."), "{}.{}".format):
            if prefix in self.removed:
                return None
            if prefix in self.renamed:
                return self.renamed[prefix] + name[len(prefix) :]
        return name


def shortened(small: Compressed) -> Shortened:
    """Shorten the lists of removed blocks.

    Raises ReplearnError that names the first part which no standard architecture has.
    """
    for fit in small.fitted.blocks:
        if fit.form != "removal":
            what = f"the {fit.form} half of a block" if fit.form in ("mlp", "attention") else f"a {fit.form} map"
            raise ReplearnError(f"{fit.name} is {what}, which {full_name(small.model)} does not have. {INSTEAD}")
    lists = block_lists(small.model, small.removed)
    renamed = {
        found.blocks[index]: found.blocks[number] for found in lists for number, index in enumerate(found.kept)
    }
    return Shortened(small.model, lists, renamed, small.removed)


def block_lists(model: nn.Module, removed: Sequence[str]) -> tuple[BlockList, ...]:
    """The lists that hold removed blocks, and those named like them, in the order of the model."""
    parents = {name.rpartition(".")[0] for name in removed}
    for parent in parents:
        if not isinstance(model.get_submodule(parent), (nn.ModuleList, nn.Sequential)):
            raise ReplearnError(
                f"{parent or full_name(model)} is no list of blocks, so it can't be built with fewer."
            )
    patterns = set(map(pattern, parents))
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and pattern(name) in patterns:
            names = tuple(f"{name}.{key}" if name else key for key in module._modules)
            kept = tuple(index for index, path in enumerate(names) if path not in removed)
            found.append(BlockList(name, names, kept))
            if not kept:
                raise ReplearnError(
                    f"All {len(names)} blocks of {name} are out; keep one, and it can be standard."
                )
    return tuple(found)


def pattern(name: str) -> str:
    """The name with its numbers taken out: equal for the stages of one network."""
    return re.sub(r"\d+", "*", name)


def full_name(model: nn.Module) -> str:
    """A model's class with the library that it comes from."""
    return f"{type(model).__module__.partition('.')[0]}'s {type(model).__name__}"
