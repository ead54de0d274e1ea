"""Do with tensors of a kind what was done with others of that kind, without asking again how.

Whether a kernel of ours takes some tensors, how it cuts its work and what it has to allocate follows from how they
look. Finding that out takes Python longer than a launch, and a deployed model does the same at every call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..kernels.conv3x3_small import kernels_run_on

Kind: TypeAlias = tuple[Hashable, ...]
Run: TypeAlias = Callable[..., Tensor]  # takes an operation's tensors, and gives its result
MOST = 4096  # kinds that are kept; more are those of a model whose inputs differ from call to call
_runs: dict[Kind, Run] = {}


def kind_of(operation: str, tensors: tuple[Tensor, *tuple[Tensor | None, ...]], *others: Hashable) -> Kind | None:
    """All that an operation of this name goes by: how its tensors look, and the `others` that it names.

    None where it goes by more than that, where gradients are computed or the first tensor is not bare; and where
    no kernel of ours runs.
    """
    first = tensors[0]
    if torch.is_grad_enabled() or not is_bare(first) or not kernels_run_on(first.device):
        return None
    looks = [x if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16) for x in tensors]
    return operation, *others, *looks


def is_bare(x: Any) -> bool:
    """Whether no dispatcher needs to hear of it, which takes as long as a launch: there are no modes and fakes.

    Nor numbers that torch keeps with the other sign.
    """
    return type(x) is Tensor and not torch._C._len_torch_dispatch_stack() and not x.is_neg()


def known_run(kind: Kind | None) -> Run | None:
    """What computes an operation of this kind, if that was found out before."""
    return None if kind is None else _runs.get(kind)


def first_run(
    kind: Kind | None, launched: Callable[..., tuple[Tensor, Run | None]], operation: Run, given: tuple[Any, ...]
) -> Tensor:
    """Compute it by launches, and remember how; where others must hear of it, as the operation that they know."""
    if not is_bare(given[0]):
        return operation(*given)
    made, run = launched(*given)
    if run is not None:
        remember(kind, run)
    return made


def remember(kind: Kind | None, run: Run) -> Run:
    """Have this compute what is of this kind from now on: launches, or torch where no kernel of ours takes it."""
    if kind is not None:
        if len(_runs) >= MOST:
            _runs.clear()
        _runs[kind] = run
    return run
