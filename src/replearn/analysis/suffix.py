"""Suffix Lipschitz factors, by power iteration on the Jacobian of the model after a block.

The suffix S maps a block's output to the model's. In eval mode samples are independent, so that one batch gives
one estimate a sample. The largest singular value at a sampled point is a lower bound of the Lipschitz constant
around it, not a guarantee.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.running import differentiable_attention
from ..compression.blockwise import first_calls
from ..errors import ReplearnError
from ..fitting.observe import first, observe, run_to
from ..planning.data import Target
from .results import Suffix
from .subject import Subject, lengths, output_of

PLACES = (0.0, 0.5, 1.0)  # positions between f_r(h) and g_r(h)
SETTLED = 1e-2  # the relative change of an estimate at which power iteration ends
BATCH = 0  # of the held-out ones, the batch whose samples are the points


def suffix_factor(subject: Subject, target: Target, *, iterations: int, product: float, seed: int) -> Suffix:
    """The factor of everything after a target, at the samples of one held-out batch."""
    (seen,) = observe(subject.full, target, subject.held[BATCH : BATCH + 1], subject.forward, split=False)

    def run(h: Tensor) -> Tensor:
        return run_from(subject, target.name, h)

    with torch.no_grad():
        made = seen.run(subject.replaced.get_submodule(target.name))
        moved = lengths(run(made) - run(seen.y))
    found = [
        largest_singular(run, torch.lerp(seen.y, made, place), iterations=iterations, seed=seed)
        for place in PLACES
    ]
    values = torch.cat([values for values, _ in found])
    between = lengths(made - seen.y)
    changed = between > 0
    return Suffix(
        factor=float(values.max()),
        realised=float((moved[changed] / between[changed]).max()) if bool(changed.any()) else 0.0,
        product=product,
        change=max(change for _, change in found),
    )


def products_after(subject: Subject, names: list[str], *, iterations: int, seed: int) -> dict[str, float]:
    """Pi_r as the paper prints it, for every block: the product of the factors of all that follow it.

    `names` are the model's blocks; their own factors come from the points of the same batch, and what
    follows the last block counts as one more.
    """
    with first_calls(subject.full, names) as calls, torch.no_grad():
        subject.output(subject.full, BATCH)
    *order, last = calls

    def largest(function: Callable[[Tensor], Tensor], point: Tensor) -> float:
        return float(largest_singular(function, point, iterations=iterations, seed=seed)[0].max())

    def own_factor(name: str) -> float:
        block, call = subject.full.get_submodule(name), calls[name]
        return largest(lambda x: first(call.with_input(x).run(block)), call.x)

    with torch.no_grad():
        end = first(calls[last].run(subject.full.get_submodule(last)))
    products = {last: largest(lambda h: run_from(subject, last, h), end)}
    following = last
    for name in reversed(order):
        products[name] = products[following] * own_factor(following)
        following = name
    return products


def run_from(subject: Subject, name: str, h: Tensor) -> Tensor:
    """The full model's output if the block of this name gave h."""

    def instead(module: nn.Module, args: Any, made: Any) -> Any:
        return (h, *made[1:]) if isinstance(made, tuple) else h

    with subject.full.get_submodule(name).register_forward_hook(instead):
        return output_of(run_to(subject.full, subject.held[BATCH], subject.forward, BATCH))


def largest_singular(
    function: Callable[[Tensor], Tensor], point: Tensor, *, iterations: int, seed: int
) -> tuple[Tensor, float]:
    """The largest singular value of a function's Jacobian at each sample, by power iteration on J'J.

    One forward pass gives the graph; J'u is a backward pass over it, and J v the derivative of J'u along u. Also
    the last relative change of the estimates.
    """
    point = point.detach().clone().requires_grad_(True)
    with torch.enable_grad(), differentiable_attention():
        made = function(point)
        if not made.requires_grad or len(made) != len(point):
            raise ReplearnError(
                "The model's output does not depend on this block's, or has no row for each sample; an analysis "
                "needs both."
            )
        cotangent = torch.zeros_like(made, requires_grad=True)
        (pulled,) = torch.autograd.grad(made, point, cotangent, create_graph=True)
        v = torch.randn(point.shape, generator=torch.Generator().manual_seed(seed)).to(point)
        size, change = torch.zeros(len(point), dtype=torch.float64, device=point.device), 0.0
        for _ in range(iterations):
            v = v / lengths(v).clamp_min(1e-30).view(-1, *[1] * (v.dim() - 1)).to(v.dtype)
            (pushed,) = torch.autograd.grad(pulled, cotangent, v, retain_graph=True)
            (v,) = torch.autograd.grad(made, point, pushed, retain_graph=True)
            before, size = size, lengths(pushed)
            change = float(((size - before).abs() / size.clamp_min(1e-30)).max())
            if change < SETTLED:
                break
    return size.detach(), change
