"""Fit coefficients that act through nonlinearities: least squares on the operator's linearisation, repeated.

    min_d sum |y - g(x; c) - J d|^2 + damping |d|^2,    J = dg/dc by forward-mode derivatives

The normal equations J'J and J'r are accumulated in float64 over batches. Every step is tried on held-out data,
with several dampings, and taken only if the true error there falls, so that the result is never worse than
the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from .observe import Seen

DAMPINGS = (1e-6, 1e-4, 1e-2, 1e-1, 1.0, 10.0)
ROUNDS = 8
ENOUGH = 1e-3  # a round that lowers the error by a smaller share is the last
BUDGET = 2**26  # numbers of the Jacobian that are held at once


Calls = Callable[[], Iterator["Seen"]]


def fit_coefficients_(operator: nn.Module, parameters: Sequence[nn.Parameter], fit: Calls, held: Calls) -> int:
    """Move the coefficients to a local least-squares optimum; the number of rounds that were worth taking."""
    least = squared_errors(operator, parameters, [packed(parameters)], held)[0]
    for done in range(ROUNDS):
        system, right = normal_equations(operator, parameters, fit)
        start = packed(parameters)
        scale = system.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
        eye = torch.eye(len(start), dtype=system.dtype, device=system.device)
        tried = [start + torch.linalg.lstsq(system + d * scale * eye, right).solution for d in DAMPINGS]
        errors = squared_errors(operator, parameters, tried, held)
        best = min(range(len(tried)), key=lambda index: errors[index])
        if not errors[best] < least:
            return done
        unpack_(tried[best], parameters)
        if errors[best] > (1 - ENOUGH) * least:
            return done + 1
        least = errors[best]
    return ROUNDS


def normal_equations(
    operator: nn.Module, parameters: Sequence[nn.Parameter], calls: Calls
) -> tuple[Tensor, Tensor]:
    """J'J (P, P) and J'r (P,) over all calls, in float64."""
    names = names_of(operator, parameters)
    point = [parameter.detach() for parameter in parameters]
    width = sum(len(values) for values in point)
    directions = torch.eye(width, dtype=point[0].dtype, device=point[0].device)
    spread = directions.split([len(values) for values in point], dim=1)
    system = torch.zeros(width, width, dtype=torch.float64, device=point[0].device)
    right = torch.zeros(width, dtype=torch.float64, device=point[0].device)
    with differentiable_attention():
        for call in calls():
            per_sample = max(1, call.y[0].numel()) * width
            for piece in call.pieces(BUDGET // per_sample):

                def run(*values: Tensor, piece: Seen = piece) -> Tensor:
                    made = functional_call(
                        operator, dict(zip(names, values, strict=True)), piece.args, piece.kwargs
                    )
                    out: Tensor = made[0] if isinstance(made, (tuple, list)) else made
                    return out

                def push(*along: Tensor, run: Callable[..., Tensor] = run) -> Tensor:
                    moved: Tensor = jvp(run, tuple(point), along)[1]
                    return moved

                residual = (piece.y - run(*point)).double().flatten()
                jacobian = vmap(push, chunk_size=32)(*spread).double().flatten(1)
                system += jacobian @ jacobian.mT
                right += jacobian @ residual
    return system, right


@torch.no_grad()
def squared_errors(
    operator: nn.Module, parameters: Sequence[nn.Parameter], points: Sequence[Tensor], calls: Calls
) -> list[float]:
    """The sum of squared errors at each of these points; the coefficients are as before afterwards."""
    before = packed(parameters)
    totals = [0.0] * len(points)
    for call in calls():
        for index, point in enumerate(points):
            unpack_(point, parameters)
            totals[index] += float((call.through(operator) - call.y).double().square().sum())
    unpack_(before, parameters)
    return [total if total == total else float("inf") for total in totals]


def differentiable_attention() -> AbstractContextManager[Any]:
    """Attention as plain arithmetic: the fused kernels have no forward-mode derivatives."""
    manager: AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH)
    return manager


def names_of(operator: nn.Module, parameters: Sequence[nn.Parameter]) -> list[str]:
    by_id = {id(parameter): name for name, parameter in operator.named_parameters()}
    return [by_id[id(parameter)] for parameter in parameters]


def packed(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in parameters])


@torch.no_grad()
def unpack_(values: Tensor, parameters: Sequence[Tensor]) -> None:
    for part, parameter in zip(values.split([p.numel() for p in parameters]), parameters, strict=True):
        parameter.copy_(part.view(parameter.shape))
