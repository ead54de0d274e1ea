"""A model as an exported program with a free batch size, and inputs to compare it on."""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection

from ...errors import ReplearnError
from ...fast.verify import rebuilt, run_on_example, tensors_in

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # what a model is called with


def inputs_of(example: Any) -> Inputs:
    """An example as users write one: a tensor, a tuple of arguments or a dict of keywords."""
    if isinstance(example, Mapping):
        inputs: Inputs = (), dict(example)
    else:
        inputs = (example if isinstance(example, tuple) else (example,)), {}
    if not any(tensor.dim() and tensor.numel() for tensor in tensors_in(inputs)):
        raise ReplearnError(
            "An export needs an example of the model's input with a batch in it: a tensor, a tuple of "
            f"arguments or a dict of keywords, as torch.randn(2, 3, 224, 224). Got {type(example).__name__}."
        )
    return rebuilt(inputs, lambda tensor: tensor.detach().cpu())


def batched(inputs: Inputs) -> list[Tensor]:
    """The tensors with as many rows as the first one: a row for each sample."""
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.dim()]
    return [tensor for tensor in tensors if len(tensor) == len(tensors[0])]


def resized(inputs: Inputs, size: int) -> Inputs:
    """The inputs with their batch repeated or cut to this size."""
    rows = len(batched(inputs)[0])
    return rebuilt(inputs, lambda t: t[torch.arange(size) % rows] if t.dim() and len(t) == rows else t)


def random_like(inputs: Inputs, seed: int) -> Inputs:
    """Random inputs of the same shapes; integers are drawn from the range of the example's."""
    generator = torch.Generator().manual_seed(seed)

    def change(value: Tensor) -> Tensor:
        if value.dtype is torch.bool:
            return value
        if value.dtype.is_floating_point:
            return torch.randn(value.shape, generator=generator).to(value.dtype)
        low, high = int(value.min()), int(value.max())
        return torch.randint(low, high + 1, value.shape, generator=generator).to(value.dtype)

    return rebuilt(inputs, change)


@torch.no_grad()
def run(model: Any, inputs: Inputs) -> list[Tensor]:
    args, kwargs = inputs
    return tensors_in(model(*args, **kwargs))


class PlainOutputs(nn.Module):
    """Returns a Hugging Face model's output object as a dict of its tensors, which any format supports."""

    forward: Any

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
def with_plain_outputs(model: nn.Module, inputs: Inputs) -> tuple[nn.Module, Any]:
    """The model if it returns tensors, else one that does, and its outputs; without attention caches."""
    config = getattr(model, "config", None)
    if getattr(config, "use_cache", None):
        config.use_cache = False  # type: ignore[union-attr]  # of our own copy
    args, kwargs = inputs
    with run_on_example(model):
        made = model(*args, **kwargs)
    if not isinstance(made, Mapping):
        return model, made
    plain = PlainOutputs(model).eval()
    return plain, plain(*args, **kwargs)


def program_of(model: nn.Module, inputs: Inputs, *, dynamic_batch: bool) -> ExportedProgram:
    """Trace the model with torch.export; ReplearnError if it can't be traced, or not with a free batch size."""
    shapes: Any = None
    if dynamic_batch:
        inputs = resized(inputs, max(2, len(batched(inputs)[0])))  # a size of 1 would be taken for a constant
        batch, shapes = Dim("batch", min=1), ShapesCollection()
        for tensor in batched(inputs):
            shapes[tensor] = {0: batch}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about torch's own insides
            return torch.export.export(model, *inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        why = next((line for line in str(error).splitlines() if line.strip()), "")
        cure = " If its batch size is fixed in its code, write dynamic_batch=False." if dynamic_batch else ""
        name = type(model.model if isinstance(model, PlainOutputs) else model).__name__
        raise ReplearnError(
            f"{name} can't be traced by torch.export ({type(error).__name__}: {why}).{cure}"
        ) from error


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """One export, the same for every format: the plain model on the CPU, and inputs."""

    model: nn.Module
    inputs: Inputs
    dynamic_batch: bool

    @cached_property
    def reference(self) -> tuple[nn.Module, Any]:
        """The model with plain outputs, and what it gives for the inputs."""
        return with_plain_outputs(self.model, self.inputs)

    @cached_property
    def program(self) -> ExportedProgram:
        return program_of(self.reference[0], self.inputs, dynamic_batch=self.dynamic_batch)
