"""Synthesize the weights of all operators of a model at once, before or during its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...errors import ReplearnError
from ...operators._base.mixture import HandOut, Made, Mixture, compute_dtype
from ...operators._base.operator import Operator, ReadingOperator
from ...operators._base.synthesis import is_sharded
from ...operators.functional import synthesize
from ..kernels._dispatch import in_transform, launches
from .batch import Batch
from .fused import fusable, mix_batch


@contextmanager
def synthesized(model: nn.Module) -> Iterator[None]:
    """Inside, the operators of a model use weights that were synthesized together, in one launch on a GPU.

    Enter it anew for every forward pass, inside autocast if you use that; the backward pass may come later.
    Without it each operator synthesizes its own weights when it is called, with the same result: on a GPU one
    launch each. Operators in a compiled model do so in any case.

    >>> import torch
    >>> import replearn
    >>> model = replearn.models.resnet32()
    >>> _ = replearn.replace_(model, replearn.plan(model, interval=4))
    >>> x = torch.randn(2, 3, 32, 32)
    >>> with replearn.fast.synthesized(model):
    ...     together = model(x)
    >>> torch.equal(together, model(x))
    True
    """
    prepared = prepare(model)
    if not (prepared.readers or any(operators_in(model))):
        raise ReplearnError("This model has no operators to synthesize for; replace_ some of its blocks first.")
    with HandOut(prepared.make()):
        yield


@contextmanager
def synthesized_on_demand(model: nn.Module) -> Iterator[None]:
    """As `synthesized`, at the first call of an operator; goes around forward and backward, with autocast inside.

    Nothing happens for models without operators and for sharded ones. Operators in a checkpointed part synthesize
    their own weights, both times.
    """
    prepared = prepare(model)
    if not prepared.readers or prepared.sharded:
        yield
        return
    with HandOut(prepared.on_demand()):
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
    parts = [part for operator in operators_in(model) for part in operator.stages()]
    return [part for part in parts if isinstance(part, ReadingOperator)]


class Prepared:
    """A model's operators with the tables of the kernel, cached from step to step.

    They are valid while every parameter is the same object at the same address. An operator that is added later
    synthesizes its own weights.
    """

    def __init__(self, readers: list[ReadingOperator]) -> None:
        self.readers = readers
        self._anchors = [anchor for reader in readers for anchor in reader.anchors()]
        entries = [entry for _, _, entry in self._anchors if isinstance(entry, Tensor)]
        self._parameters = [tensor for tensor in entries if not is_sharded(tensor)]
        self.sharded = len(self._parameters) < len(entries)
        self._before = self._state()
        self._owners: list[tuple[int, str]] = []
        self._batch: Batch | None = None
        mixtures = [(id(r), n, m) for r in readers for n, m in r.mixtures().items() if m is not None]
        storages = {tensor.untyped_storage().data_ptr() for tensor in self._parameters}
        fused = all(reads_parameters(mixture, storages) for *_, mixture in mixtures)
        alike = len({(m.tensors[0].dtype, m.tensors[0].device) for *_, m in mixtures}) == 1
        if fused and alike and len({reader.stored_dtype for reader in readers}) <= 1:
            self._owners = [(owner, name) for owner, name, _ in mixtures]
            self._batch = Batch.of([mixture for *_, mixture in mixtures])

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

    def on_demand(self) -> Callable[[], dict[int, Made]]:
        """A function that synthesizes everything when it is first called, with gradients as now."""
        learning, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kept: list[dict[int, Made]] = []

        def make() -> dict[int, Made]:
            if in_transform():  # results are not valid outside of the transform
                return made_for(self.readers)
            if in_checkpoint(learning):
                return {}
            if not kept:
                with torch.inference_mode(inference), torch.set_grad_enabled(learning):
                    kept.append(self.make())
            return kept[0]

        return make

    def make(self) -> dict[int, Made]:
        """The weights by operator."""
        if self._batch is None or in_transform():
            return made_for(self.readers)
        dtype = compute_dtype(self._batch.tensors[0], self.readers[0].stored_dtype)
        made: dict[int, Made] = {id(reader): {} for reader in self.readers}
        for (owner, name), tensor in zip(self._owners, mix_batch(self._batch, dtype), strict=True):
            made[owner][name] = tensor
        return made


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
        and fusable(mixture) is mixture
        and all(tensor.untyped_storage().data_ptr() in storages for tensor in mixture.tensors)
    )


_prepared: WeakKeyDictionary[nn.Module, Prepared] = WeakKeyDictionary()


def operators_in(model: nn.Module) -> Iterator[Operator]:
    """The operators of a model; the parts of a composed one are not listed."""
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, Operator):
            yield module
        else:
            waiting += [child for child in module._modules.values() if child is not None]


def made_for(readers: list[ReadingOperator]) -> dict[int, Made]:
    """The weights of these operators, by the operator's id."""
    mixtures: dict[str, Mixture] = {}
    groups: dict[torch.dtype, list[str]] = {}
    for number, reader in enumerate(readers):
        for name, mixture in reader.mixtures().items():
            if mixture is not None:
                key = f"{number}/{name}"
                mixtures[key] = mixture
                dtype = compute_dtype(mixture.tensors[0], reader.stored_dtype)
                groups.setdefault(dtype, []).append(key)
    made: dict[int, Made] = {id(reader): {} for reader in readers}
    for dtype, names in groups.items():
        for key, tensor in synthesize({name: mixtures[name] for name in names}, dtype).items():
            owner, _, name = key.partition("/")
            made[id(readers[int(owner)])][name] = tensor
    return made
