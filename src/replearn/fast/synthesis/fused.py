"""Synthesis in one Triton kernel each way, for any number of mixtures at once.

`Mixture.plain` is the reference that this must equal. What the kernels know of the mixtures is in `batch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...operators._base.mixture import CORRECTION, NEXT, PREVIOUS, A, B, Mixture
from .batch import Batch, rows_are_dense

_KNOWN = (torch.float32, torch.bfloat16, torch.float16)


def fusable(mixture: Mixture) -> bool:
    """True if the kernel computes this mixture."""
    if mixture.previous is None and mixture.next is None:
        return False
    first, *others = [t for t in (mixture.previous, mixture.next, mixture.correction) if t is not None]
    return (
        first.dtype in _KNOWN
        and all(t.dtype is first.dtype and t.stride() == first.stride() for t in others)
        and all(c is None or c.is_contiguous() for c in (mixture.a, mixture.b))
        and rows_are_dense(first)
    )


def mix(batch: Batch, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Synthesize the mixtures of a batch in one launch, with gradients."""
    return _Mix.apply(batch, dtype, *batch.tensors)  # type: ignore[no-untyped-call]


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: Batch, dtype: torch.dtype, *tensors: Tensor) -> Any:
        out = torch.empty(batch.sizes.weights, dtype=dtype, device=batch.device)
        kernels().launch_forward(batch, out)
        ctx.batch = batch
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*batch.watched)  # raises if one is changed in place before backward
        made = [layout.view(out, layout.start) for layout in batch.layouts]
        needed = ctx.needs_input_grad[2:]
        if not all(needed):
            learning = {number for (number, _), needs in zip(batch.places, needed, strict=True) if needs}
            ctx.mark_non_differentiable(*(each for n, each in enumerate(made) if n not in learning))
        return tuple(made)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        batch: Batch = ctx.batch
        if batch.watched:
            ctx.saved_tensors  # noqa: B018  raises if a source was changed in place
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        flat = gather(batch, grads)
        # unused weights have no gradient, as in plain torch
        needed = [
            needs and grads[number] is not None
            for (number, _), needs in zip(batch.places, ctx.needs_input_grad[2:], strict=True)
        ]
        wanted = {role for (_, role), needs in zip(batch.places, needed, strict=True) if needs}

        def room(size: int, *roles: int) -> Tensor:
            size = 0 if wanted.isdisjoint(roles) else size
            return torch.empty(size, dtype=batch.source, device=batch.device)

        sources = room(batch.sizes.sources, PREVIOUS, NEXT)
        corrections = room(batch.sizes.weights, CORRECTION)
        partials = torch.empty(batch.sizes.partials, dtype=torch.float32, device=batch.device)
        kernels().launch_backward(batch, flat, partials, sources, corrections)
        found: list[Tensor | None] = []
        for (number, role), needs in zip(batch.places, needed, strict=True):
            layout = batch.layouts[number]
            if not needs:
                found.append(None)
            elif role in (A, B):
                found.append(layout.coefficient_grad(partials, layout.partials[role - A], batch.along[number]))
            elif role == CORRECTION:
                found.append(layout.view(corrections, layout.start))
            else:
                found.append(layout.view(sources, layout.sources[role]))
        return (None, None, *found)


@cache
def kernels() -> Any:
    """Imported on first use: Triton is optional."""
    from . import _triton

    return _triton


def gather(batch: Batch, grads: Sequence[Tensor | None]) -> Tensor:
    """All gradients in one buffer with the layout of the weights, in one launch."""
    given = [(layout, grad) for layout, grad in zip(batch.layouts, grads, strict=True) if grad is not None]
    flat = given[0][1].new_zeros(batch.sizes.weights)
    torch._foreach_copy_([layout.view(flat, layout.start) for layout, _ in given], [grad for _, grad in given])
    return flat
