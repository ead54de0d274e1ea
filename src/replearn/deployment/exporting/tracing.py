"""A model as an exported program with a free batch size, and inputs to try it on."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from ...errors import ReplearnError
from ...fast.verify import run_on_example, tensors_in


@dataclass(frozen=True, eq=False, kw_only=True)
class Inputs:
    """What a model is called with. The batch is the first dimension of the first tensor, and of all as long."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        return {**{str(index): value for index, value in enumerate(self.args)}, **self.kwargs}

    @property
    def tensors(self) -> list[Tensor]:
        return [value for value in self.values.values() if isinstance(value, Tensor)]

    @property
    def batch_size(self) -> int:
        return next(int(tensor.shape[0]) for tensor in self.tensors if tensor.dim())

    def mapped(self, change: Any) -> Inputs:
        kwargs = {name: change(value) for name, value in self.kwargs.items()}
        return Inputs(args=tuple(change(value) for value in self.args), kwargs=kwargs)

    def is_batched(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == self.batch_size


def inputs_of(example: Any) -> Inputs:
    """An example as users write one: a tensor, a tuple of arguments or a dict of keywords."""
    if isinstance(example, Mapping):
        inputs = Inputs(kwargs=dict(example))
    else:
        inputs = Inputs(args=example if isinstance(example, tuple) else (example,))
    if not any(tensor.dim() and tensor.numel() for tensor in inputs.tensors):
        raise ReplearnError(
            "An export needs an example of the model's input with a batch in it: a tensor, a tuple of "
            f"arguments or a dict of keywords, as torch.randn(2, 3, 224, 224). Got {type(example).__name__}."
        )
    return inputs.mapped(lambda value: value.detach().cpu() if isinstance(value, Tensor) else value)


def resized(inputs: Inputs, size: int) -> Inputs:
    """The inputs with their batch repeated or cut to this size."""

    def change(value: Any) -> Any:
        if not inputs.is_batched(value):
            return value
        times = -(-size // value.shape[0])
        return value.repeat(times, *[1] * (value.dim() - 1))[:size].contiguous()

    return inputs.mapped(change)


def random_like(inputs: Inputs, seed: int) -> Inputs:
    """Random inputs of the same shapes; whole numbers stay within those of the example."""
    generator = torch.Generator().manual_seed(seed)

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype is torch.bool:
            return value
        if value.dtype.is_floating_point:
            return torch.randn(value.shape, generator=generator).to(value.dtype)
        low, high = int(value.min()), int(value.max())
        return torch.randint(low, high + 1, value.shape, generator=generator).to(value.dtype)

    return inputs.mapped(change)


@torch.no_grad()
def run(model: Any, inputs: Inputs) -> list[Tensor]:
    return tensors_in(model(*inputs.args, **inputs.kwargs))


class PlainOutputs(nn.Module):
    """Returns a Hugging Face model's output object as a dict of its tensors, which any program can hold."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

        def forward(*args: Any, **kwargs: Any) -> Any:
            made = model(*args, **kwargs)
            return {name: value for name, value in made.items() if isinstance(value, Tensor)}

        # torch.export takes the inputs' names from it
        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]
        self.forward = forward


@torch.no_grad()
def with_plain_outputs(model: nn.Module, inputs: Inputs) -> nn.Module:
    """The model itself if it returns tensors; else one that does. Attention caches are left out."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = False  # type: ignore[union-attr]  # of our own copy
    with run_on_example(model):
        made = model(*inputs.args, **inputs.kwargs)
    if isinstance(made, Tensor) or (isinstance(made, tuple) and all(isinstance(one, Tensor) for one in made)):
        return model
    return PlainOutputs(model).eval() if isinstance(made, Mapping) else model


def program_of(model: nn.Module, inputs: Inputs, *, dynamic_batch: bool) -> ExportedProgram:
    """Trace the model with torch.export; ReplearnError where it can't be traced, or fixes its batch size."""
    shapes: Any = None
    if dynamic_batch:
        inputs = resized(inputs, max(2, inputs.batch_size))  # a size of 1 would be taken for a constant
        batch, shapes = Dim("batch", min=1), ShapesCollection()
        for value in filter(inputs.is_batched, inputs.values.values()):
            shapes[value] = {0: batch}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch's own insides
            kwargs = dict(inputs.kwargs)
            return torch.export.export(model, inputs.args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        why = next((line for line in str(error).splitlines() if line.strip()), "")
        cure = " If its batch size is fixed in its code, write dynamic_batch=False." if dynamic_batch else ""
        name = type(model.model if isinstance(model, PlainOutputs) else model).__name__
        raise ReplearnError(
            f"{name} can't be traced by torch.export ({type(error).__name__}: {why}).{cure}"
        ) from error


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """One export, the same for every format: the plain model on the CPU, inputs, and its program."""

    model: nn.Module
    inputs: Inputs
    dynamic_batch: bool
    opset: int | None

    @cached_property
    def program(self) -> ExportedProgram:
        called = with_plain_outputs(self.model, self.inputs)
        return program_of(called, self.inputs, dynamic_batch=self.dynamic_batch)
