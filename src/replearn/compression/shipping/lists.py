"""The block lists of a compressed model, and every module's name once the empty places are closed up."""

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
    """An nn.ModuleList or nn.Sequential of blocks: its name, its length, and the places that are kept."""

    name: str
    blocks: tuple[str, ...]  # names
    kept: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, eq=False)
class Shortened:
    """A model without its empty places: the lists that got shorter, and their siblings of equal pattern."""

    model: nn.Module
    lists: tuple[BlockList, ...]
    renamed: dict[str, str]  # a kept block's name, and its name once the list is closed up
    removed: tuple[str, ...]

    @property
    def changed(self) -> tuple[BlockList, ...]:
        return tuple(found for found in self.lists if len(found.kept) < found.length)

    def siblings(self, of: BlockList) -> tuple[BlockList, ...]:
        return tuple(found for found in self.lists if pattern(found.name) == pattern(of.name))

    def new_name(self, name: str) -> str | None:
        """The name of a module or a tensor in the shorter model; None for what is gone."""
        for prefix in accumulate(name.split("."), "{}.{}".format):
            if prefix in self.removed:
                return None
            if prefix in self.renamed:
                return self.renamed[prefix] + name[len(prefix) :]
        return name


def shortened(small: Compressed) -> Shortened:
    """Close up the lists that blocks were taken out of.

    Raises ReplearnError that names the first thing which no standard architecture has.
    """
    for fit in small.fitted.blocks:
        if fit.form != "removal":
            what = f"the {fit.form} half of a block" if fit.form in ("mlp", "attention") else f"a {fit.form} map"
            raise ReplearnError(f"{fit.name} is {what}, which {named(small.model)} does not have. {INSTEAD}")
    lists = block_lists(small.model, small.removed)
    renamed = {
        found.blocks[place]: found.blocks[number] for found in lists for number, place in enumerate(found.kept)
    }
    return Shortened(small.model, lists, renamed, small.removed)


def block_lists(model: nn.Module, removed: Sequence[str]) -> tuple[BlockList, ...]:
    """The lists that hold removed blocks, and those named like them, in the order of the model."""
    parents = {name.rpartition(".")[0] for name in removed}
    for parent in parents:
        if not isinstance(model.get_submodule(parent), (nn.ModuleList, nn.Sequential)):
            raise ReplearnError(f"{parent or named(model)} is no list of blocks, so it can't be built with fewer.")
    patterns = set(map(pattern, parents))
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and pattern(name) in patterns:
            names = tuple(f"{name}.{key}" if name else key for key in module._modules)
            kept = tuple(place for place, path in enumerate(names) if path not in removed)
            found.append(BlockList(name, names, kept))
            if not kept:
                raise ReplearnError(
                    f"All {len(names)} blocks of {name} are out; keep one, and it can be standard."
                )
    return tuple(found)


def pattern(name: str) -> str:
    """The name with its numbers taken out: equal for the stages of one network."""
    return re.sub(r"\d+", "*", name)


def named(model: nn.Module) -> str:
    """A model's class with the library that it comes from."""
    return f"{type(model).__module__.partition('.')[0]}'s {type(model).__name__}"
