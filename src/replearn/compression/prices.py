"""What blocks and their stand-ins cost, measured one by one: the promise before anything is fitted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..planning.validate import own_copy
from ..surgery.hidden_states import record_replacement
from ..surgery.replace import set_submodule
from .batches import Data
from .calls import Arguments
from .corrections import Correction, adopt_attributes_, after_of, attention_half, merged, mlp_half, pass_through
from .measure import Price, block_cost, costs, count, example_of
from .recognise import Recognition, first_calls
from .stand_ins import Form, Place, empty_map, map_inputs


class Prices:
    """The cost of every block and of what can stand for it, on the example batch; like blocks are timed once."""

    def __init__(self, model: nn.Module, found: Recognition, data: Data, rank: int) -> None:
        self.model, self.found, self.rank = model, found, rank
        example = example_of(data)
        self.stream = data.stream
        few = Data((example,), data.forward, example.size, stream=data.stream)
        (self.now,) = costs([model], few)
        self._calls = first_calls(model, found.way, few)
        self._blocks = {block.name: block for block in found.blocks}
        self._known: dict[tuple[Any, str], Price] = {}

    def block(self, name: str) -> Price:
        """What a block costs."""
        return self._measured(name, "")

    def stand_in(self, name: str, form: Form) -> Price:
        """What a form costs in a block's place."""
        return Price(0, 0, 0) if form == "removal" else self._measured(name, form)

    def after(self, forms: Mapping[str, Form]) -> Price:
        """What the model costs with these forms; of adjacent blocks the last one's stands for all."""
        total = self.now
        order = self.found.way.blocks
        for name, form in forms.items():
            at = order.index(name) + 1
            inner = at < len(order) and order[at] in forms and order[at] in self.found.way.follows
            total = total - self.block(name) + (Price(0, 0, 0) if inner else self.stand_in(name, form))
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
        order = self.found.way.blocks
        for name, form in forms.items():
            at = order.index(name) + 1
            inner = at < len(order) and order[at] in forms and order[at] in self.found.way.follows
            block = self._blocks[name]
            if inner or form == "removal":
                stand_in = pass_through(block.argument, block.structure.trace.length)
            else:
                stand_in = self._empty(name, made.get_submodule(name), form, self._calls[name])
            set_submodule(made, name, stand_in)
            adopt_attributes_(stand_in, self.model.get_submodule(name))
            record_replacement(made, self.model.get_submodule(name), stand_in)
        return made

    def _measured(self, name: str, form: Form | str) -> Price:
        block, arguments = self.model.get_submodule(name), self._calls[name]
        shapes = tuple((path, tuple(p.shape)) for path, p in block.named_parameters())
        key = ((type(block), shapes, tuple(arguments.x.shape)), form)
        if key not in self._known:
            with torch.no_grad(), self.stream.weights(block):
                arguments = Arguments(self.stream.load(arguments.args), self.stream.load(arguments.kwargs))
                module = block if not form else self._empty(name, block, form, arguments)  # type: ignore[arg-type]
                self._known[key] = block_cost(module, arguments)
        return self._known[key]

    def _empty(self, name: str, block: nn.Module, form: Form, arguments: Arguments) -> nn.Module:
        """A stand-in of the right shape with any weights."""
        known = self._blocks[name]
        place = Place(name, block, known.structure, known.argument, known.structure.trace.length)
        half: nn.Module | None = None
        if form == "mlp":
            found = mlp_half(copy.deepcopy(block), known.structure, argument=place.argument, length=place.length)
            half = found[0] if found else None
        elif form == "attention":
            half = attention_half(block, known.structure, arguments)
        if half is not None:
            return half.eval()
        after = after_of(block, known.structure) if known.structure.residual else None
        rich: Form = "full" if form in ("mlp", "attention") else form
        made = Correction(
            empty_map(place, rich, arguments.x, self.rank), after, argument=place.argument, length=place.length
        )
        made = made.to(arguments.x.device, arguments.x.dtype).eval()
        return made if place.argument or place.length else merged(made) or made


def eval_copy(model: nn.Module, *, share: bool = False) -> nn.Module:
    """A copy in eval mode; one that is only run may share the weights."""
    made = own_copy(model, share=share)
    for module in made.modules():
        module.training = False
    return made
