"""The costs of blocks and of their unfitted replacements, measured one by one, and predicted costs of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..planning.validate import own_copy
from .activations import Arguments
from .batches import Data
from .forms import Form, half_block, identity_for, merge_correction, replace_block_, with_signature
from .measure import Price, block_cost, costs, count, example_of, parameter_uses
from .recognise import Recognition, smallest_batch_calls
from .replacement_fit import ReplacedBlock, num_map_inputs, unfitted_correction


class BlockCosts:
    """Costs of blocks and of their replacements on the example batch; equal blocks are timed once."""

    def __init__(self, model: nn.Module, recognition: Recognition, data: Data, rank: int) -> None:
        self.model, self.recognition, self.rank = model, recognition, rank
        example = example_of(data)
        self.offloader, self._uses = data.offloader, parameter_uses(model)
        example_data = Data((example,), data.forward, example.size, offloader=data.offloader)
        (self.model_cost,) = costs([model], example_data)
        self._calls = smallest_batch_calls(model, recognition.order, example_data)
        self._structures = {block.name: block.structure for block in recognition.blocks}
        self._measured: dict[Any, Price] = {}

    def predict(self, forms: Mapping[str, Form]) -> Price:
        """The predicted cost of the model with blocks replaced by these forms."""
        total = self.model_cost
        for name, form in self.recognition.order.collapse_spans(forms).items():
            total = total - self.cost(name) + self.cost(name, form)
        return total

    def accurate_forms(self) -> dict[str, Form]:
        """The most accurate form for every block; low rank where a full map is nearly as large as the block."""
        forms: dict[str, Form] = {}
        for block in self.recognition.blocks:
            module, x = self.model.get_submodule(block.name), self._calls[block.name].x
            num_weights = num_map_inputs(module, block.structure, x) * x.shape[block.structure.channel]
            form: Form = "full" if num_weights <= 0.75 * count(module) else "low-rank"
            forms[block.name] = "mlp" if block.structure.kind == "transformer" else form
        return forms

    @torch.no_grad()
    def unfitted_model(self, forms: Mapping[str, Form]) -> nn.Module:
        """A copy of the model with unfitted replacements, which are as fast as fitted ones."""
        copied = eval_copy(self.model, share=True)
        for name, form in self.recognition.order.collapse_spans(forms).items():
            block = copied.get_submodule(name)
            replace_block_(copied, name, self._unfitted_replacement(name, block, form, self._calls[name]))
        return copied

    def cost(self, name: str, form: Form | None = None) -> Price:
        """The cost of a block, or of its replacement of this form."""
        if form == "removal":
            return Price(0, 0, 0)
        block, arguments = self.model.get_submodule(name), self._calls[name]
        shapes = tuple((path, tuple(p.shape)) for path, p in block.named_parameters())
        uses_inside = parameter_uses(block)
        shared = sum(p.numel() for p in block.parameters() if uses_inside[id(p)] < self._uses[id(p)])
        key = ((type(block), shapes, tuple(arguments.x.shape)), form, shared)
        if key not in self._measured:
            with torch.no_grad(), self.offloader.loaded(block):
                arguments = arguments.apply(self.offloader.load)
                module = block if form is None else self._unfitted_replacement(name, block, form, arguments)
                self._measured[key] = block_cost(module, arguments) - Price(0, 0, shared if form is None else 0)
        return self._measured[key]

    def _unfitted_replacement(self, name: str, block: nn.Module, form: Form, arguments: Arguments) -> nn.Module:
        """A replacement with the right shapes and arbitrary weights."""
        structure = self._structures[name]
        if form == "removal":
            return identity_for(structure)
        if form in ("mlp", "attention"):
            half = half_block(form, block, structure, arguments)
            if half is not None:
                return half[0]
            form = "full"
        module = unfitted_correction(ReplacedBlock(name, block, structure), form, arguments.x, self.rank)
        return with_signature(merge_correction(module), structure)


def eval_copy(model: nn.Module, *, share: bool = False) -> nn.Module:
    """A copy in eval mode; with `share`, it has the same weights and must not change them."""
    copied = own_copy(model, share=share)
    for module in copied.modules():
        module.training = False
    return copied
