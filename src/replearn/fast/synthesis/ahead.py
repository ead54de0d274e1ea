"""Synthesize the weights of all operators of a model in one launch, at the first call of one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...operators._base.mixture import Mixture, Weights, compute_dtype, providing_weights
from ...operators._base.operator import ReadingOperator
from ...operators._base.synthesis import is_sharded
from ...surgery.replace import operators_of
from ..kernels._dispatch import in_transform, launches
from .batch import Batch
from .fused import fusable, mix


@contextmanager
def synthesized_on_demand(model: nn.Module) -> Iterator[None]:
    """Inside, the operators of a model use weights that were synthesized in one launch, at the first call of one.

    It goes around the forward and the backward pass, with autocast inside. An operator synthesizes its own
    weights, with the same result, in compiled code, in torch.func transforms and in a checkpointed part, both
    times. So do all operators of a model that is not on a GPU or sharded, and those of one that has a weight which
    the kernel does not take, as with a low-rank correction.
    """
    prepared = prepare(model)
    if prepared.batch is None:
        yield
        return
    with providing_weights(prepared.on_demand()):
        yield


def prepare(model: nn.Module) -> Prepared:
    """The cached tables of a model, rebuilt if its parameters changed."""
    found = _prepared.get(model)
    if found is None or not found.holds():
        found = Prepared(readers_in(model))
        if found.readers:  # without readers nothing would invalidate it
            _prepared[model] = found
    return found


def readers_in(model: nn.Module) -> list[ReadingOperator]:
    """All operators of a model that synthesize, the halves of composed ones one by one."""
    parts = [part for _, operator in operators_of(model) for part in operator.stages()]
    return [part for part in parts if isinstance(part, ReadingOperator)]


class Prepared:
    """A model's operators with the tables of the kernel, cached from step to step.

    They are valid while every parameter is the same object at the same address. An operator that is added later
    synthesizes its own weights.
    """

    def __init__(self, readers: list[ReadingOperator]) -> None:
        self.readers = readers
        self._anchors = [anchor for reader in readers for anchor in reader.anchors()]
        self._parameters = [entry for _, _, entry in self._anchors if isinstance(entry, Tensor)]
        if any(is_sharded(parameter) for parameter in self._parameters):
            self._parameters, readers = [], []
        self._before = self._state()
        mixtures = [(id(r), n, m) for r in readers for n, m in r.mixtures().items() if m is not None]
        storages = {tensor.untyped_storage().data_ptr() for tensor in self._parameters}
        fused = all(reads_parameters(mixture, storages) for *_, mixture in mixtures)
        kinds = {(m.tensors[0].dtype, m.tensors[0].device) for *_, m in mixtures}
        stored = {reader.stored_dtype for reader in readers}
        self._owners = [(owner, name) for owner, name, _ in mixtures]
        self.batch = Batch([m for *_, m in mixtures]) if fused and len(kinds) == len(stored) == 1 else None

    def holds(self) -> bool:
        return all(register.get(name) is entry for register, name, entry in self._anchors) and (
            self._state() == self._before
        )

    def _state(self) -> list[Any]:
        """Addresses and layouts of the parameters, and whether gradients are recorded."""
        return [
            torch.is_grad_enabled(),
            *[(t.data_ptr(), t.dtype, t.stride(), t.requires_grad) for t in self._parameters],
        ]

    def on_demand(self) -> Callable[[], dict[int, Weights]]:
        """A function that synthesizes everything when it is first called, with gradients as now."""
        learning, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kept: list[dict[int, Weights]] = []

        def make() -> dict[int, Weights]:
            if in_transform() or in_checkpoint(learning):
                return {}
            if not kept:
                with torch.inference_mode(inference), torch.set_grad_enabled(learning):
                    kept.append(self.make())
            return kept[0]

        return make

    def make(self) -> dict[int, Weights]:
        """The weights by operator."""
        assert self.batch is not None
        dtype = compute_dtype(self.batch.tensors[0], self.readers[0].stored_dtype)
        weights: dict[int, Weights] = {owner: {} for owner, _ in self._owners}
        for (owner, name), tensor in zip(self._owners, mix(self.batch, dtype), strict=True):
            weights[owner][name] = tensor
        return weights


def in_checkpoint(learning: bool) -> bool:
    """True in a checkpointed part, in its first run and its recomputation, which must save the same tensors."""
    hooks: Any = torch._C._autograd
    return (
        torch.is_grad_enabled() is not learning
        or torch._C._current_graph_task_id() != -1
        or (learning and hooks._top_saved_tensors_default_hooks(True) is not None)
    )


def reads_parameters(mixture: Mixture, storages: set[int]) -> bool:
    """True if the kernel computes all of it from parameters alone."""
    return (
        all(launches(tensor) for tensor in mixture.tensors)
        and fusable(mixture)
        and all(tensor.untyped_storage().data_ptr() in storages for tensor in mixture.tensors)
    )


_prepared: WeakKeyDictionary[nn.Module, Prepared] = WeakKeyDictionary()
