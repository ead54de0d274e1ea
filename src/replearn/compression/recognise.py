"""The door `recognise`: the blocks of a model by what they compute, in the order in which they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..blocks.running import unchanged
from ..errors import ReplearnError, first_line
from ..planning.planner import stacks_of
from ..planning.table import shown, text_table
from ..planning.targets import has_hooks
from ..planning.validate import own_copy
from ..surgery.replace import set_submodule
from .batches import Data, Forward, read
from .calls import Arguments
from .corrections import pass_through, put_
from .streaming import Stream
from .structure import Structure, understand
from .walking import Way, find_way, first_calls, smallest


@dataclass(frozen=True, slots=True)
class Block:
    """One block: what it is, and why it can't go, if it can't."""

    name: str
    type: str
    structure: Structure
    kept: str = ""


@dataclass(frozen=True, slots=True)
class Recognition:
    """The blocks of a model; `print` shows a table."""

    model: str
    blocks: tuple[Block, ...]
    way: Way

    @property
    def candidates(self) -> tuple[str, ...]:
        return tuple(block.name for block in self.blocks if not block.kept)

    def __str__(self) -> str:
        rows = [
            (shown(b.name), shown(b.type), b.structure.kind, str(len(b.structure.layers)), b.kept)
            for b in self.blocks
        ]
        head = ("block", "class", "computes", "layers", "stays because")
        title = f"{shown(self.model)}: {len(self.candidates)} of {len(self.blocks)} blocks can go"
        return "\n".join([title, "", *text_table(head, rows, right=(3,))])


def recognise(model: nn.Module, loader: Any, *, forward: Forward | None = None) -> Recognition:
    """Find the blocks of a model and what each computes, from one run; the model is not touched.

    Raises ReplearnError where there are no blocks.
    """
    data = loader if isinstance(loader, Data) else read(loader, forward=forward, samples=8, model=model)
    names = [name for stack in stacks_of(model) for name in stack.blocks]
    data = data.through(names)
    with unchanged(model), torch.no_grad():
        way = find_way(model, names, data)
        calls = smallest_calls(model, way, data)
        found = tuple(_block(model, name, calls[name], data.stream) for name in way.blocks)
        needed = needed_blocks(model, found, data)
        found = tuple(replace(b, kept=needed[b.name]) if b.name in needed else b for b in found)
    return Recognition(type(model).__name__, found, way)


def needed_blocks(model: nn.Module, blocks: Sequence[Block], data: Data) -> dict[str, str]:
    """Blocks without which the model does not run, and why: its code reads a part of them, for example.

    Blocks are taken out of a copy, all at once and, where that fails, one after another.
    """
    copied, batch = own_copy(model, share=True), smallest(data)
    going = [block for block in blocks if not block.kept]

    def take_out(block: Block) -> None:
        put_(copied, block.name, pass_through(block.structure))

    def fails() -> str:
        try:
            data.run(copied, batch)
        except ReplearnError as error:
            cause = error.__cause__
            if isinstance(cause, AttributeError):
                return f"the model's code reads its {cause.name}"
            return f"the model does not run without it: {cause or error}"
        return ""

    originals = {block.name: copied.get_submodule(block.name) for block in going}
    for block in going:
        take_out(block)
    if not fails():
        return {}
    for block in going:
        set_submodule(copied, block.name, originals[block.name])
    needed: dict[str, str] = {}
    for block in going:
        take_out(block)
        if why := fails():
            needed[block.name] = why
            set_submodule(copied, block.name, originals[block.name])
    return needed


def smallest_calls(model: nn.Module, way: Way, data: Data) -> dict[str, Arguments]:
    """The arguments of every block on the smallest batch."""
    with first_calls(model, way.blocks) as calls:
        data.run(model, smallest(data))
    return {name: call.moved(data.stream.keep) for name, call in calls.items()}


def _block(model: nn.Module, name: str, arguments: Arguments, stream: Stream) -> Block:
    module = model.get_submodule(name)
    try:
        with stream.weights(module):
            structure = understand(module, arguments.moved(stream.load))
    except RuntimeError as error:  # for example what autocast in a forward= would have cast
        raise ReplearnError(
            f"{name} can't be run by itself on what the model gave it ({first_line(error)}). Give batches and a "
            "model of one dtype, and no autocast."
        ) from error
    kept = ""
    if not structure.keeps_shape:
        kept = f"it turns {tuple(arguments.x.shape[1:])} into {structure.trace.shape[1:] or 'no tensor'}"
    elif has_hooks(module):
        kept = "it has hooks, which would be lost with it"
    elif sum(other is module for _, other in model.named_modules(remove_duplicate=False)) > 1:
        kept = "the same module stands in two places"
    return Block(name, type(module).__name__, structure, kept)
