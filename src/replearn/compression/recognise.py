"""Recognise the blocks of a model by what they compute, in the order in which they run."""

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
from .activations import Arguments
from .batches import Data, Forward, read
from .blockwise import BlockOrder, find_order, first_calls, smallest_batch
from .forms import identity_for, replace_block_
from .offload import Offloader
from .structure import Structure, read_structure


@dataclass(frozen=True, slots=True)
class Block:
    """One block, with the reason why it can't be removed in `kept`, if there is one."""

    name: str
    type: str
    structure: Structure
    kept: str = ""


@dataclass(frozen=True, slots=True)
class Recognition:
    """The blocks of a model; `print` shows a table."""

    model: str
    blocks: tuple[Block, ...]
    order: BlockOrder

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
    """Find the blocks of a model and what each computes, from one run; the model is not changed.

    Raises ReplearnError for a model without blocks.
    """
    data = loader if isinstance(loader, Data) else read(loader, forward=forward, samples=8, model=model)
    names = [name for stack in stacks_of(model) for name in stack.blocks]
    data = data.offload_blocks(names)
    with unchanged(model), torch.no_grad():
        order = find_order(model, names, data)
        calls = smallest_batch_calls(model, order, data)
        blocks = tuple(_recognise_block(model, name, calls[name], data.offloader) for name in order.blocks)
        required = required_blocks(model, blocks, data)
        blocks = tuple(replace(b, kept=required[b.name]) if b.name in required else b for b in blocks)
    return Recognition(type(model).__name__, blocks, order)


def required_blocks(model: nn.Module, blocks: Sequence[Block], data: Data) -> dict[str, str]:
    """The blocks without which the model does not run, with the reasons.

    Blocks are removed from a copy, all at once and, if that fails, one after another.
    """
    copied, batch = own_copy(model, share=True), smallest_batch(data)
    removable = [block for block in blocks if not block.kept]

    def remove(block: Block) -> None:
        replace_block_(copied, block.name, identity_for(block.structure))

    def failure() -> str:
        try:
            data.run(copied, batch)
        except ReplearnError as error:
            cause = error.__cause__
            if isinstance(cause, AttributeError):
                return f"the model's code reads its {cause.name}"
            return f"the model does not run without it: {cause or error}"
        return ""

    originals = {block.name: copied.get_submodule(block.name) for block in removable}
    for block in removable:
        remove(block)
    if not failure():
        return {}
    for block in removable:
        set_submodule(copied, block.name, originals[block.name])
    required: dict[str, str] = {}
    for block in removable:
        remove(block)
        if why := failure():
            required[block.name] = why
            set_submodule(copied, block.name, originals[block.name])
    return required


def smallest_batch_calls(model: nn.Module, order: BlockOrder, data: Data) -> dict[str, Arguments]:
    """The arguments of every block on the smallest batch."""
    with first_calls(model, order.blocks) as calls:
        data.run(model, smallest_batch(data))
    return {name: call.apply(data.offloader.store) for name, call in calls.items()}


def _recognise_block(model: nn.Module, name: str, arguments: Arguments, offloader: Offloader) -> Block:
    module = model.get_submodule(name)
    try:
        with offloader.loaded(module):
            structure = read_structure(module, arguments.apply(offloader.load))
    except RuntimeError as error:  # dtypes that autocast in a forward= would have cast, for example
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
