"""What blocks and their stand-ins cost, measured one by one: the promise before anything is fitted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..planning.validate import own_copy
from .batches import Data
from .calls import Arguments
from .corrections import Form, as_called, half_of, merged, pass_through, put_
from .measure import Price, block_cost, costs, count, example_of, holders
from .recognise import Recognition, smallest_calls
from .stand_ins import Place, empty_correction, map_inputs


class Prices:
    """The cost of every block and of what can stand for it, on the example batch; like blocks are timed once."""

    def __init__(self, model: nn.Module, found: Recognition, data: Data, rank: int) -> None:
        self.model, self.found, self.rank = model, found, rank
        example = example_of(data)
        self.stream, self._held = data.stream, holders(model)
        few = Data((example,), data.forward, example.size, stream=data.stream)
        (self.now,) = costs([model], few)
        self._calls = smallest_calls(model, found.way, few)
        self._structures = {block.name: block.structure for block in found.blocks}
        self._known: dict[Any, Price] = {}

    def block(self, name: str) -> Price:
        """What a block costs."""
        return self._measured(name, None)

    def stand_in(self, name: str, form: Form) -> Price:
        """What a form costs in a block's place."""
        return Price(0, 0, 0) if form == "removal" else self._measured(name, form)

    def after(self, forms: Mapping[str, Form]) -> Price:
        """What the model costs with these forms."""
        total = self.now
        for name, form in self.found.way.one_for_a_span(forms).items():
            total = total - self.block(name) + self.stand_in(name, form)
        return total

    def richest(self) -> dict[str, Form]:
        """The form that keeps most for every block; low rank where a full map is nearly as large as the block."""
        found: dict[str, Form] = {}
        for block in self.found.blocks:
            module, x = self.model.get_submodule(block.name), self._calls[block.name].x
            size = map_inputs(module, block.structure, x) * x.shape[block.structure.channel]
            rich: Form = "full" if size <= 0.75 * count(module) else "low-rank"
            found[block.name] = "mlp" if block.structure.kind == "transformer" else rich
        return found

    @torch.no_grad()
    def unfitted(self, forms: Mapping[str, Form]) -> nn.Module:
        """The model with unfitted stand-ins, which are as fast as fitted ones."""
        made = eval_copy(self.model, share=True)
        for name, form in self.found.way.one_for_a_span(forms).items():
            put_(made, name, self._empty(name, made.get_submodule(name), form, self._calls[name]))
        return made

    def _measured(self, name: str, form: Form | None) -> Price:
        block, arguments = self.model.get_submodule(name), self._calls[name]
        shapes = tuple((path, tuple(p.shape)) for path, p in block.named_parameters())
        inside = holders(block)
        stays = sum(p.numel() for p in block.parameters() if inside[id(p)] < self._held[id(p)])
        key = ((type(block), shapes, tuple(arguments.x.shape)), form, stays)
        if key not in self._known:
            with torch.no_grad(), self.stream.weights(block):
                arguments = arguments.moved(self.stream.load)
                module = block if form is None else self._empty(name, block, form, arguments)
                self._known[key] = block_cost(module, arguments) - Price(0, 0, stays if form is None else 0)
        return self._known[key]

    def _empty(self, name: str, block: nn.Module, form: Form, arguments: Arguments) -> nn.Module:
        """A stand-in of the right shape with any weights."""
        structure = self._structures[name]
        if form == "removal":
            return pass_through(structure)
        if form in ("mlp", "attention"):
            half = half_of(form, block, structure, arguments)
            if half is not None:
                return half[0]
            form = "full"
        made = empty_correction(Place(name, block, structure), form, arguments.x, self.rank)
        return as_called(merged(made), structure)


def eval_copy(model: nn.Module, *, share: bool = False) -> nn.Module:
    """A copy in eval mode; one that is only run may share the weights."""
    made = own_copy(model, share=share)
    for module in made.modules():
        module.training = False
    return made
