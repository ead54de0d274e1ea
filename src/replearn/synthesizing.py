"""Make the weights of all operators of a model at once, before its forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .errors import ReplearnError
from .operators.base import Operator, ReadingOperator
from .operators.fused import Batch, fusable, kernels_run_on, mix_batch, synthesize
from .operators.mixture import HandOut, Made, Mixture, dtype_beside
from .operators.sharded import is_sharded
from .transforms import transformed


@contextmanager
def synthesized(model: nn.Module) -> Iterator[None]:
    """Inside, the operators of a model compute with weights that were made together, in one launch on a GPU.

    Enter it anew for every forward pass, inside autocast if you use that; the backward pass may come later.
    Without it each operator makes its own weights when it is called, with the same result: on a GPU that is one
    launch each. Operators in a compiled model make their own in any case.

    >>> import torch
    >>> import replearn
    >>> model = replearn.models.resnet32()
    >>> _ = replearn.replace_(model, replearn.plan(model, interval=4))
    >>> x = torch.randn(2, 3, 32, 32)
    >>> with replearn.synthesized(model):
    ...     together = model(x)
    >>> torch.equal(together, model(x))
    True
    """
    prepared = _prepared.get(model)
    if prepared is None or not prepared.holds():
        prepared = _prepared[model] = Prepared(readers_in(model))
    with HandOut(prepared.made()):
        yield


def readers_in(model: nn.Module) -> list[ReadingOperator]:
    """All operators of a model that synthesize, the halves of composed ones one by one."""
    operators = list(operators_in(model))
    if not operators:
        raise ReplearnError("This model has no operators to synthesize for; replace_ some of its blocks first.")
    parts = [part for operator in operators for part in operator.stages()]
    return [part for part in parts if isinstance(part, ReadingOperator)]


class Prepared:
    """A model's operators with what the kernel needs to know of their weights, kept from step to step.

    In eager training the GPU waits for Python, and finding all this anew takes longer than the kernel. It holds
    as long as every parameter that is read is the same object in the same memory. An operator that came later
    finds nothing made for it, and makes its own; one that went is made for in vain.
    """

    def __init__(self, readers: list[ReadingOperator]) -> None:
        self._readers = readers
        self._anchors = [anchor for reader in readers for anchor in reader.anchors()]
        tensors = [entry for _, _, entry in self._anchors if isinstance(entry, Tensor)]
        self._lasting = [(tensor, tensor.data_ptr()) for tensor in tensors if not is_sharded(tensor)]
        self._places: list[tuple[int, str]] = []
        self._batch: Batch | None = None
        mixtures = [(id(r), n, m) for r in readers for n, m in r.mixtures().items() if m is not None]
        kernels = bool(mixtures) and all(self._can_stay(mixture) for *_, mixture in mixtures)
        alike = len({(m.tensors[0].dtype, m.tensors[0].device) for *_, m in mixtures}) == 1
        if kernels and alike and len({reader.stored_dtype for reader in readers}) == 1:
            self._places = [(owner, name) for owner, name, _ in mixtures]
            self._batch = Batch.of([mixture for *_, mixture in mixtures])

    def _can_stay(self, mixture: Mixture) -> bool:
        """Whether the kernel makes all of it, and reads nothing that was computed just now."""
        homes = {tensor.untyped_storage().data_ptr() for tensor, _ in self._lasting}
        return (
            all(kernels_run_on(tensor) for tensor in mixture.tensors)
            and fusable(mixture) is mixture
            and all(tensor.untyped_storage().data_ptr() in homes for tensor in mixture.tensors)
        )

    def holds(self) -> bool:
        return all(register.get(name) is entry for register, name, entry in self._anchors) and all(
            tensor.data_ptr() == address for tensor, address in self._lasting
        )

    def made(self) -> dict[int, Made]:
        """What each operator computes with, by its identity."""
        if self._batch is None or transformed():
            return made_for(self._readers)
        example = next(tensor for tensor in self._batch.tensors if tensor is not None)
        dtype = dtype_beside(example, self._readers[0].stored_dtype)
        made: dict[int, Made] = {id(reader): {} for reader in self._readers}
        for (owner, name), tensor in zip(self._places, mix_batch(self._batch, dtype), strict=True):
            made[owner][name] = tensor
        return made


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
    """What each of these operators computes with, by its identity."""
    mixtures: dict[str, Mixture] = {}
    groups: dict[torch.dtype, list[str]] = {}
    for number, reader in enumerate(readers):
        for name, mixture in reader.mixtures().items():
            if mixture is not None:
                key = f"{number}/{name}"
                mixtures[key] = mixture
                dtype = dtype_beside(mixture.tensors[0], reader.stored_dtype)
                groups.setdefault(dtype, []).append(key)
    made: dict[int, Made] = {id(reader): {} for reader in readers}
    for dtype, names in groups.items():
        for key, tensor in synthesize({name: mixtures[name] for name in names}, dtype).items():
            owner, _, name = key.partition("/")
            made[id(readers[int(owner)])][name] = tensor
    return made
