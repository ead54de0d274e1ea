"""Suffix Lipschitz factors, by power iteration on the Jacobian of the model behind a block.

The suffix S maps a block's output to the model's. In eval mode samples don't mix, so that one batch gives
one estimate a sample. The largest singular value at a sampled point is a local factor: an estimate from
below of the Lipschitz constant around it, not a guarantee.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks.running import differentiable_attention
from ..errors import ReplearnError
from ..fitting.observe import first, observe, repeatable, run_to
from ..planning.data import Target
from .results import Suffix
from .subject import Subject, lengths, output_of

PLACES = (0.0, 0.5, 1.0)  # between f_r(h) and g_r(h): the way that a replacement moves the activation
SETTLED = 1e-2  # the relative change of an estimate at which power iteration ends
BATCH = 0  # of the held-out ones, the batch whose samples are the points


@dataclass(frozen=True, eq=False)
class Singular:
    """Estimated largest singular values, one a sample, and how far they had settled."""

    values: Tensor
    iterations: int
    change: float
    disagreement: float


def suffix_factor(
    subject: Subject, target: Target, *, starts: int, iterations: int, product: float, seed: int
) -> Suffix:
    """The factor of everything behind a target, at the samples of one held-out batch."""
    (seen,) = observe(subject.full, target, subject.held[BATCH : BATCH + 1], subject.forward, split=False)

    def run(h: Tensor) -> Tensor:
        return run_from(subject, target.name, h)

    with torch.no_grad():
        made = seen.through(subject.replaced.get_submodule(target.name))
        moved = lengths(run(made) - run(seen.y))
    found = [
        largest_singular(run, torch.lerp(seen.y, made, place), starts=starts, iterations=iterations, seed=seed)
        for place in PLACES
    ]
    values = torch.cat([singular.values for singular in found])
    between = lengths(made - seen.y)
    changed = between > 0
    return Suffix(
        factor=float(values.max()),
        mean=float(values.mean()),
        realised=float((moved[changed] / between[changed]).max()) if bool(changed.any()) else 0.0,
        product=product,
        points=len(values),
        starts=starts,
        iterations=max(singular.iterations for singular in found),
        change=max(singular.change for singular in found),
        disagreement=max(singular.disagreement for singular in found),
    )


def products_after(
    subject: Subject, names: list[str], *, starts: int, iterations: int, seed: int
) -> dict[str, float]:
    """Pi_r as the paper prints it, for every block: the product of the factors of all that follow it.

    `names` are the model's blocks; their own factors come from the points of the same batch, and what
    follows the last block counts as one more.
    """
    calls = called(subject, names)
    order = list(calls)
    settings = {"starts": starts, "iterations": iterations, "seed": seed}
    last = order[-1]
    with torch.no_grad():
        end = first(_again(subject.full, last, calls[last], calls[last][2]))
    running = float(largest_singular(lambda h: run_from(subject, last, h), end, **settings).values.max())
    products = {last: running}
    for name, following in zip(reversed(order[:-1]), reversed(order[1:]), strict=True):
        call = calls[following]

        def through(x: Tensor, name: str = following, call: Any = call) -> Tensor:
            made: Tensor = first(_again(subject.full, name, call, x))
            return made

        running *= float(largest_singular(through, call[2], **settings).values.max())
        products[name] = running
    return products


def called(subject: Subject, names: list[str]) -> dict[str, tuple[Any, Any, Tensor]]:
    """How each block is called on the batch, in the order in which the model runs them."""
    found: dict[str, tuple[Any, Any, Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            place: Any = next((i for i, v in enumerate(args) if v is x), None)
            place = place if place is not None else next(key for key, v in kwargs.items() if v is x)
            given = (tuple(map(repeatable, args)), {k: repeatable(v) for k, v in kwargs.items()})
            found[name] = (given, place, x.detach().clone())

        return before

    handles = [
        subject.full.get_submodule(name).register_forward_pre_hook(note(name), with_kwargs=True) for name in names
    ]
    try:
        with torch.no_grad():
            subject.output(subject.full, BATCH)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _again(model: nn.Module, name: str, call: tuple[Any, Any, Tensor], x: Tensor) -> Any:
    """Call a block once more, with another input."""
    (args, kwargs), place, _ = call
    if isinstance(place, int):
        args = (*args[:place], x, *args[place + 1 :])
    else:
        kwargs = {**kwargs, place: x}
    return model.get_submodule(name)(*args, **kwargs)


def run_from(subject: Subject, name: str, h: Tensor) -> Tensor:
    """The full model's output if the block of this name gave h."""

    def instead(module: nn.Module, args: Any, made: Any) -> Any:
        return (h, *made[1:]) if isinstance(made, tuple) else h

    handle = subject.full.get_submodule(name).register_forward_hook(instead)
    try:
        return output_of(run_to(subject.full, subject.held[BATCH], subject.forward, BATCH))
    finally:
        handle.remove()


def largest_singular(
    function: Callable[[Tensor], Tensor], point: Tensor, *, starts: int, iterations: int, seed: int
) -> Singular:
    """The largest singular value of a function's Jacobian at each sample, by power iteration on J'J.

    One forward pass gives the graph; J'u is a backward pass over it, and J v the derivative of J'u along u.
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
        generator = torch.Generator().manual_seed(seed)
        results, change, most = [], 0.0, 0
        for _ in range(starts):
            v = torch.randn(point.shape, generator=generator).to(point)
            size = torch.zeros(len(point), dtype=torch.float64, device=point.device)
            done, shift = 0, 0.0
            for _ in range(iterations):
                done += 1
                v = v / _spread(lengths(v).clamp_min(1e-30), v)
                (pushed,) = torch.autograd.grad(pulled, cotangent, v, retain_graph=True)
                (v,) = torch.autograd.grad(made, point, pushed, retain_graph=True)
                before, size = size, lengths(pushed)
                shift = float(((size - before).abs() / size.clamp_min(1e-30)).max())
                if shift < SETTLED:
                    break
            results.append(size)
            change, most = max(change, shift), max(most, done)
    values = torch.stack(results)
    best = values.max(dim=0).values
    spread = (best - values.min(dim=0).values) / best.clamp_min(1e-30)
    return Singular(best.detach(), most, change, float(spread.max()))


def _spread(lengths_: Tensor, like: Tensor) -> Tensor:
    return lengths_.view(-1, *[1] * (like.dim() - 1)).to(like.dtype)
