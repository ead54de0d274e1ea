"""A weight to be synthesized, as data: which sources, which coefficients, which correction.

    W = scale * (factor * a * norm(W_prev) + factor * b * norm(W_next) + D)     (eq:general_synthesis)

Operators say what they need as mixtures. `Mixture.plain` is the arithmetic in ordinary torch: the reference, and
what runs where `fast.accelerate` does not make all mixtures of a model in one kernel.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .synthesis import autocasting, per_head, per_row, unit_rows, wide

PREVIOUS, NEXT, CORRECTION, A, B = range(5)  # the places of a mixture
Along = Literal["all", "rows", "heads"]  # what one coefficient multiplies: everything, a row, a head's columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """One weight: at most two sources, each with a coefficient or with none, and at most one correction."""

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
        terms = [self._term(wide(source), coefficient) for source, coefficient in sides if source is not None]
        if self.correction is not None:
            terms.append(wide(self.correction))
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
        """Whether it is one source itself, times a number at most: its gradient needs no value of that."""
        return not self.normalise and len(self.tensors) == 1

    @property
    def places(self) -> tuple[Tensor | None, ...]:
        return self.previous, self.next, self.correction, self.a, self.b

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.places if tensor is not None)


Mixtures = Mapping[str, Mixture | None]
Made = dict[str, Tensor]


def compute_dtype(x: Tensor, stored: torch.dtype) -> torch.dtype:
    """The dtype that x is computed in by a layer whose weights are stored in this one."""
    if not autocasting(x):
        return x.dtype
    # autocast leaves float64 alone
    return stored if stored is torch.float64 else torch.get_autocast_dtype(x.device.type)


# What was made for all operators of a model together, by operator: no state on modules, which may be copied.
Everything = dict[int, Made]
_handed_out: ContextVar[Callable[[], Everything] | None] = ContextVar("handed_out", default=None)


def handed_out(operator: object, dtype: torch.dtype) -> Made | None:
    """What was made for this operator beforehand, if it was, and in the right dtype."""
    everything = _handed_out.get()
    made = None if everything is None else everything().get(id(operator))
    return made if made and all(tensor.dtype is dtype for tensor in made.values()) else None


@contextmanager
def handing_out(made: Callable[[], Everything]) -> Iterator[None]:
    """Inside, operators have their weights made together when the first one asks."""
    token = _handed_out.set(made)
    try:
        yield
    finally:
        _handed_out.reset(token)
