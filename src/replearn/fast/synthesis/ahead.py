"""Make the weights of all operators of a model at once, before its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...errors import ReplearnError
from ...operators._base.mixture import HandOut, Made, Mixture, dtype_beside
from ...operators._base.operator import Operator, ReadingOperator
from ...operators._base.sharded import is_sharded
from ...operators._base.stand_ins import InPlace, Place, some_stand_in
from ...operators._base.synthesis import autocasting
from ...operators.functional import synthesize
from ..kernels._transforms import transformed
from ..train.overlapped_wgrad import mixed_behind_gate
from .batch import Batch, kernels_run_on
from .casting import cast_places, tree_of
from .fused import fusable, mix_batch

Anchor = tuple[dict[str, Any], str, Any]  # a register, a name in it, and what stands there


@contextmanager
def synthesized(model: nn.Module, *, cast: bool = False) -> Iterator[None]:
    """Inside, the operators of a model compute with weights that were made together, in one launch on a GPU.

    Enter it anew for every forward pass, inside autocast if you use that; the backward pass may come later.
    Without it each operator makes its own weights when it is called, with the same result: on a GPU that is one
    launch each. Operators in a compiled model make their own in any case.

    With `cast`, on a GPU under autocast, the same launch casts the weights of all linear layers and convolutions,
    which autocast does one by one: for eager steps, which wait for Python. A layer computes the same numbers, and
    a model without operators may be given too. Layers hold the cast weights meanwhile, so only the forward pass
    belongs inside: nothing that saves, copies, loads or clips. It is not for models that are compiled, sharded or
    in DistributedDataParallel, nor for those that switch autocast off in a part of theirs.

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
    prepared = prepared_for(model, operators=True, cast=cast)
    if not (cast or prepared.readers or any(operators_in(model))):
        raise ReplearnError("This model has no operators to synthesize for; replace_ some of its blocks first.")
    with prepared.used():
        yield


def cast_together(model: nn.Module) -> AbstractContextManager[None]:
    """As `synthesized` with `cast`, but operators make their own weights, or find those that they are given."""
    return prepared_for(model, operators=False, cast=True).used()


def prepared_for(model: nn.Module, *, operators: bool, cast: bool) -> Prepared:
    """What was worked out for a model before, where it still holds."""
    cast = cast and autocasts(model)
    known = _prepared.setdefault(model, {})
    found = known.get((operators, cast))
    if found is None or not found.holds():
        readers = readers_in(model) if operators else []
        places = list(cast_places(model)) if cast else []
        found = Prepared(readers, places, around=list(tree_of(model)) if places else [])
        # with nothing to check it would hold for ever, and inside of another the layers hold stand-ins
        if (readers or places) and not some_stand_in():
            known[operators, cast] = found
    return found


def autocasts(model: nn.Module) -> bool:
    """Whether autocast is on where the model is."""
    parameter = next(model.parameters(), None)
    return parameter is not None and autocasting(parameter)


def readers_in(model: nn.Module) -> list[ReadingOperator]:
    """All operators of a model that synthesize, the halves of composed ones one by one."""
    parts = [part for operator in operators_in(model) for part in operator.stages()]
    return [part for part in parts if isinstance(part, ReadingOperator)]


class Prepared:
    """A model's operators and layers with what the kernel needs to know of their weights, kept from step to step.

    In eager training the GPU waits for Python, and finding all this anew takes longer than the kernel. It holds
    as long as every parameter that is read is the same object in the same memory, and every module on the way to a
    layer that is cast for (`around`) stays. An operator that came later makes its own weights.
    """

    def __init__(self, readers: list[ReadingOperator], places: list[Place], around: list[Anchor]) -> None:
        self.readers, self._places = readers, places
        self._anchors = [*(anchor for reader in readers for anchor in reader.anchors()), *places, *around]
        entries = [entry for _, _, entry in self._anchors if isinstance(entry, Tensor)]
        self._lasting = [tensor for tensor in entries if not is_sharded(tensor)]
        self._were = self._are()
        self._owners: list[tuple[int, str]] = []
        self._batch: Batch | None = None
        mixtures = [(id(r), n, m) for r in readers for n, m in r.mixtures().items() if m is not None]
        homes = {tensor.untyped_storage().data_ptr() for tensor in self._lasting}
        kernels = all(can_stay(mixture, homes) for *_, mixture in mixtures)
        wanted = [*(mixture for *_, mixture in mixtures), *(Mixture(previous=place.parameter) for place in places)]
        alike = len({(m.tensors[0].dtype, m.tensors[0].device) for m in wanted}) == 1
        if kernels and alike and len({reader.stored_dtype for reader in readers}) <= 1:
            self._owners = [(owner, name) for owner, name, _ in mixtures]
            self._batch = Batch.of(wanted)

    def holds(self) -> bool:
        return all(register.get(name) is entry for register, name, entry in self._anchors) and (
            self._are() == self._were
        )

    def _are(self) -> list[Any]:
        """Where the parameters lie, and what a part of one that was taken then has a gradient by."""
        return [
            torch.is_grad_enabled(),
            *[(t.data_ptr(), t.dtype, t.stride(), t.requires_grad) for t in self._lasting],
        ]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Make everything; inside, operators and layers find it. Where the kernel can't, layers are left alone."""
        if self._may_wait():
            with HandOut(self._make_when_asked()):
                yield
            return
        made, tensors = self._make(self._dtype())
        casts = InPlace(self._places, tensors) if tensors else nullcontext()
        with HandOut(made) if self.readers else nullcontext(), casts:
            yield

    def _dtype(self) -> torch.dtype | None:
        """What the kernel is to make."""
        stored = self.readers[0].stored_dtype if self.readers else torch.float32
        return None if self._batch is None else dtype_beside(self._batch.tensors[0], stored)

    def _make_when_asked(self) -> Callable[[], dict[int, Made]]:
        """What makes everything when it is first called, as if it were now."""
        dtype, learning, inference = self._dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kept: list[dict[int, Made]] = []

        def make() -> dict[int, Made]:
            if transformed():  # and what is made now is of use to nobody else
                return made_for(self.readers)
            if not kept:
                # who asks first may be recomputed later, and without gradients now
                with torch.inference_mode(inference), torch.set_grad_enabled(learning):
                    kept.append(self._make(dtype)[0])
            return kept[0]

        return make

    def _make(self, dtype: torch.dtype | None) -> tuple[dict[int, Made], tuple[Tensor, ...]]:
        """The operators' weights, by operator, and those of the layers."""
        if self._batch is None or dtype is None or transformed():
            return made_for(self.readers), ()
        tensors = mix_batch(self._batch, dtype)
        made: dict[int, Made] = {id(reader): {} for reader in self.readers}
        for (owner, name), tensor in zip(self._owners, tensors, strict=False):
            made[owner][name] = tensor
        return made, tensors[len(self._owners) :]

    def _may_wait(self) -> bool:
        """Whether weights are better made when the first operator asks, and nobody but operators needs them.

        Backwards autograd then comes to them right after that operator, where gradients are computed beside, and
        not after all else.
        """
        return (
            self._batch is not None
            and not self._places
            and not transformed()
            and mixed_behind_gate(self._batch.tensors) is not None
        )


def can_stay(mixture: Mixture, homes: set[int]) -> bool:
    """Whether the kernel makes all of it, and reads nothing that was computed just now."""
    return (
        all(kernels_run_on(tensor) for tensor in mixture.tensors)
        and fusable(mixture) is mixture
        and all(tensor.untyped_storage().data_ptr() in homes for tensor in mixture.tensors)
    )


_prepared: WeakKeyDictionary[nn.Module, dict[tuple[bool, bool], Prepared]] = WeakKeyDictionary()


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
