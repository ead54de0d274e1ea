"""What operators compute with, in plain torch: the reference that `replearn.fast` may register faster versions of.

A faster version takes the same arguments and returns None where it does not apply. The files of `fast/kernels`
register theirs when they are imported, which happens the first time that a tensor on a GPU comes.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ._base.layers import Activation, Convolution
from ._base.mixture import Made, Mixtures
from ._base.synthesis import full_precision

F = TypeVar("F", bound=Callable[..., Any])
_faster: dict[str, Callable[..., Any]] = {}
_provider = "replearn.fast.registration"  # imported by name: operators know nothing of what makes them fast
_loaded = False


def register(name: str) -> Callable[[F], F]:
    """Register a faster version of the function of this name."""

    def keep(function: F) -> F:
        _faster[name] = function
        return function

    return keep


def load_faster() -> None:
    """Import what registers faster versions."""
    global _loaded
    _loaded = True
    import_module(_provider)


def faster(name: str, device: torch.device) -> Callable[..., Any] | None:
    """The faster version of a function, if there is one."""
    if not _loaded and device.type == "cuda" and not torch.compiler.is_compiling():
        load_faster()
    return _faster.get(name)


def with_faster(reference: F) -> F:
    """Compute by the faster version of a function where one takes the positional arguments."""

    @wraps(reference)
    def call(x: Tensor, *others: Any, **named: Any) -> Any:
        fast = faster(reference.__name__, x.device)
        made = None if fast is None else fast(x, *others)
        return reference(x, *others, **named) if made is None else made

    return call  # type: ignore[return-value]


def synthesize(mixtures: Mixtures, dtype: torch.dtype) -> Made:
    """Make every weight in this dtype."""
    wanted = {name: mixture for name, mixture in mixtures.items() if mixture is not None}
    if not wanted:
        return {}
    with full_precision(next(iter(wanted.values())).tensors[0].device):
        return {name: mixture.plain().to(dtype) for name, mixture in wanted.items()}


@with_faster
def norm_add_act(
    x: Tensor, norm: nn.Module, activation: Activation, residual: Tensor | None = None, *, in_place: bool = False
) -> Tensor:
    """activation(norm(x) + residual); `in_place` writes the sum where the norm's result is, in its dtype."""
    made: Tensor = norm(x)
    if residual is None:
        return activation(made)
    if in_place:
        made += residual
        return activation(made)
    return activation(residual + made)


@with_faster
def reduced_bottleneck(
    x: Tensor,
    reduction: tuple[Convolution, Tensor],
    expansion: tuple[Convolution, Tensor],
    norm: nn.Module,
    activation: Activation,
) -> Tensor:
    """activation(x + norm(expand * activation(reduce * x)))."""
    (reduce, reducing), (expand, expanding) = reduction, expansion
    return norm_add_act(expand(activation(reduce(x, reducing)), expanding), norm, activation, x)
