"""The subject of an analysis: the full model, its replaced copy, and the held-out batches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..compression.measure import main_output
from ..errors import ReplearnError
from ..fitting.observe import Forward, run_to
from ..planning.data import Plan
from ..surgery.replace import set_submodule

Loss = Callable[[Tensor, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Subject:
    """The full model F, F_RepL, and the held-out data; both models are copies in eval mode."""

    full: nn.Module
    replaced: nn.Module
    plan: Plan
    held: tuple[Any, ...]
    reference: tuple[Tensor, ...]  # F's outputs on them
    forward: Forward
    loss: Loss | None

    def output(self, model: nn.Module, number: int) -> Tensor:
        """A model's output on a held-out batch."""
        return finite_output(model, self.held[number], self.forward, number)

    def mean_loss(self, output: Tensor, number: int) -> Tensor:
        """The given loss, or the cross-entropy against the full model's own predictions."""
        if self.loss is not None:
            return self.loss(output, self.held[number])
        return cross_entropy(output.flatten(0, -2), self.reference[number].flatten(0, -2).argmax(-1))

    @property
    def labels(self) -> str:
        return "the given loss" if self.loss is not None else "the full model's own predictions"


@contextmanager
def exchanged(model: nn.Module, name: str, module: nn.Module) -> Iterator[None]:
    """Inside, another module is in a block's place; the neighbours that it reads equal those of this model."""
    block = model.get_submodule(name)
    set_submodule(model, name, module)
    try:
        yield
    finally:
        set_submodule(model, name, block)


def finite_output(model: nn.Module, batch: Any, forward: Forward, number: int) -> Tensor:
    """A model's output tensor; ReplearnError where there is none, or it holds NaN."""
    made = output_of(run_to(model, batch, forward, number))
    if not bool(torch.isfinite(made).all()):
        raise ReplearnError(
            f"The outputs of {type(model).__name__} hold NaN or infinity on held-out batch {number}; check the "
            "batch and the weights."
        )
    return made


def output_of(made: Any) -> Tensor:
    """The tensor in what a model returned, with a row for each sample."""
    found = main_output(made)
    if found.dim() < 2:
        raise ReplearnError(
            f"The model returns a tensor of shape {tuple(found.shape)}, and an analysis compares outputs with a "
            "row a sample; give forward= that returns one."
        )
    return found


def lengths(rows: Tensor) -> Tensor:
    """The Euclidean norm of each sample, in float64."""
    return rows.double().flatten(1).norm(dim=1)
