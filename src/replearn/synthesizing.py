"""Make the weights of all operators of a model at once, before its forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .errors import ReplearnError
from .operators.base import Operator, ReadingOperator
from .operators.fused import synthesize
from .operators.mixture import HandOut, Made, Mixture, dtype_beside


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
    readers = _readers.get(model)
    if readers is None:
        operators = list(operators_in(model))
        if not operators:
            raise ReplearnError(
                "This model has no operators to synthesize for; replace_ some of its blocks first."
            )
        parts = [part for operator in operators for part in operator.stages()]
        readers = _readers[model] = [part for part in parts if isinstance(part, ReadingOperator)]
    with HandOut(made_for(readers)):
        yield


# Walking a large model takes longer than making its weights. An operator that came later finds nothing made for it
# here, and makes its own; one that went is made for in vain.
_readers: WeakKeyDictionary[nn.Module, list[ReadingOperator]] = WeakKeyDictionary()


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
