"""The functions that operators call, in plain torch. `replearn.fast` may register faster versions of them.

A faster version takes the same arguments and returns None where it does not apply. The files of `fast/kernels`
register theirs on import, at the first call with a CUDA tensor.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ._base.layers import Activation, Convolution
from ._base.mixture import Mixtures, Weights
from ._base.synthesis import full_precision

F = TypeVar("F", bound=Callable[..., Any])
_faster: dict[str, Callable[..., Any]] = {}
_provider = "replearn.fast.registration"  # imported by name, since operators import nothing of `fast`
_loaded = False


def register(name: str) -> Callable[[F], F]:
    """Register a faster version of the function of this name."""

    def decorate(function: F) -> F:
        _faster[name] = function
        return function

    return decorate


def load_faster() -> None:
    """Import the module that registers faster versions."""
    global _loaded
    _loaded = True
    import_module(_provider)


def faster(name: str, device: torch.device) -> Callable[..., Any] | None:
    """The faster version of a function, if there is one."""
    if not _loaded and device.type == "cuda" and not torch.compiler.is_compiling():
        load_faster()
    return _faster.get(name)


def with_faster(reference: F) -> F:
    """Call the faster version of a function, with the positional arguments alone, and else the reference."""

    @wraps(reference)
    def call(x: Tensor, *others: Any, **named: Any) -> Any:
        fast = faster(reference.__name__, x.device)
        result = None if fast is None else fast(x, *others)
        return reference(x, *others, **named) if result is None else result

    return call  # type: ignore[return-value]


def synthesize(mixtures: Mixtures, dtype: torch.dtype) -> Weights:
    """Every weight, computed in float32 or float64 and cast to this dtype."""
    present = {name: mixture for name, mixture in mixtures.items() if mixture is not None}
    if not present:
        return {}
    with full_precision(next(iter(present.values())).tensors[0].device):
        return {name: mixture.plain().to(dtype) for name, mixture in present.items()}


@with_faster
def norm_add_act(
    x: Tensor, norm: nn.Module, activation: Activation, residual: Tensor | None = None, *, in_place: bool = False
) -> Tensor:
    """activation(norm(x) + residual); `in_place` adds the residual to the norm's output in place, in its dtype."""
    y: Tensor = norm(x)
    if residual is None:
        return activation(y)
    if in_place:
        y += residual
        return activation(y)
    return activation(residual + y)


@with_faster
def reduced_bottleneck(
    x: Tensor,
    reduction: tuple[Convolution, Tensor],
    expansion: tuple[Convolution, Tensor],
    norm: nn.Module,
    activation: Activation,
) -> Tensor:
    """activation(x + norm(expand * activation(reduce * x)))."""
    (reduce, reduce_kernel), (expand, expand_kernel) = reduction, expansion
    return norm_add_act(expand(activation(reduce(x, reduce_kernel)), expand_kernel), norm, activation, x)
