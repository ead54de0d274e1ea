"""A weight to be synthesized, as data: its sources, coefficients and correction.

    W = scale * (factor * a * norm(W_prev) + factor * b * norm(W_next) + D)     (eq:general_synthesis)

Operators describe their weights as mixtures. `Mixture.plain` computes one in plain torch. It is the reference, and
runs wherever `fast.accelerate` does not compute all mixtures of a model in one kernel.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .synthesis import autocasting, per_head, per_row, unit_rows, upcast

PREVIOUS, NEXT, CORRECTION, A, B = range(5)  # positions in `Mixture.places`
Along = Literal["all", "rows", "heads"]  # what one coefficient multiplies: the weight, a row, a head's columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """One weight: up to two sources, each with or without a coefficient, and up to one correction."""

    previous: Tensor | None = None
    next: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    correction: Tensor | None = None
    along: Along = "all"
    normalise: bool = False
    factor: float = 1.0
    scale: float = 1.0

    def plain(self) -> Tensor:
        """The weight in float32, or float64 for a float64 model."""
        sides = ((self.previous, self.a), (self.next, self.b))
        terms = [self._term(upcast(source), coefficient) for source, coefficient in sides if source is not None]
        if self.correction is not None:
            terms.append(upcast(self.correction))
        total = sum(terms[1:], terms[0])
        return total if self.scale == 1.0 else self.scale * total

    def _term(self, source: Tensor, coefficient: Tensor | None) -> Tensor:
        if self.normalise:
            source = unit_rows(source)
        if self.factor != 1.0:
            source = self.factor * source
        if coefficient is None:
            return source
        if self.along == "all":
            return coefficient * source
        return (per_row if self.along == "rows" else per_head)(coefficient, source) * source

    @property
    def is_a_cast(self) -> bool:
        """True for one source times a constant: its gradient needs no saved values."""
        return not self.normalise and len(self.tensors) == 1

    @property
    def places(self) -> tuple[Tensor | None, ...]:
        return self.previous, self.next, self.correction, self.a, self.b

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.places if tensor is not None)


Mixtures = Mapping[str, Mixture | None]
Weights = dict[str, Tensor]


def compute_dtype(x: Tensor, stored: torch.dtype) -> torch.dtype:
    """The dtype in which a layer with weights of dtype `stored` computes on x."""
    if not autocasting(x):
        return x.dtype
    # autocast leaves float64 alone
    return stored if stored is torch.float64 else torch.get_autocast_dtype(x.device.type)


WeightsByOperator = dict[int, Weights]  # by id; not stored on the modules, which may be copied
_provider: ContextVar[Callable[[], WeightsByOperator] | None] = ContextVar("provider", default=None)


def prepared_weights(operator: object, dtype: torch.dtype) -> Weights | None:
    """The weights that the provider computed for this operator, if there are any and in this dtype."""
    provider = _provider.get()
    weights = None if provider is None else provider().get(id(operator))
    return weights if weights and all(tensor.dtype is dtype for tensor in weights.values()) else None


@contextmanager
def providing_weights(provider: Callable[[], WeightsByOperator]) -> Iterator[None]:
    """Inside, operators take their weights from `provider`, which computes those of all operators together."""
    token = _provider.set(provider)
    try:
        yield
    finally:
        _provider.reset(token)
