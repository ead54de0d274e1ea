"""Synthesis in one Triton kernel each way, for any number of mixtures at once.

`Mixture.plain` is the reference that this must equal. What the kernels know of the mixtures is in `batch.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from ...operators._base.mixture import CORRECTION, NEXT, PREVIOUS, A, B, Made, Mixture
from ...operators._base.synthesis import full_precision
from ...operators.functional import register
from ..kernels._dispatch import has_memory, in_transform, is_aligned, on_gpu
from .batch import Batch, Layout, rows_are_dense, source_dtype

_KNOWN = (torch.float32, torch.bfloat16, torch.float16)


@register("synthesize")
def synthesize_on_gpu(mixtures: Mapping[str, Mixture], dtype: torch.dtype) -> Made | None:
    """Synthesize every mixture in one kernel; None off the GPU and in compiled code."""
    device = next(iter(mixtures.values())).tensors[0].device
    fused = on_gpu(device) and not torch.compiler.is_compiling()
    return synthesize_fused(mixtures, dtype) if fused else None


def synthesize_fused(mixtures: Mapping[str, Mixture], dtype: torch.dtype) -> Made:
    """Synthesize the mixtures together; those that the kernel does not take in plain torch."""
    known = {} if in_transform() else {n: ready for n, m in mixtures.items() if (ready := fusable(m)) is not None}
    made: Made = {}
    groups: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name, mixture in known.items():
        # a correction that was computed just now (low rank) has no fixed address: it is added afterwards
        result = dtype if mixture.correction is mixtures[name].correction else torch.float32
        groups.setdefault((source_dtype(mixture), result), []).append(name)
    for (_, result), names in groups.items():
        made |= dict(zip(names, mix([known[name] for name in names], result), strict=True))
    for name, mixture in known.items():
        correction = mixtures[name].correction
        if correction is not None and mixture.correction is None:
            made[name] = made[name].add(correction, alpha=mixture.scale).to(dtype)
    for name, mixture in mixtures.items():
        if name not in made:
            with full_precision(mixture.tensors[0].device):
                made[name] = mixture.plain().to(dtype)
    return {name: made[name] for name in mixtures}


def fusable(mixture: Mixture) -> Mixture | None:
    """The part of a mixture that the kernel computes (all, or all but its correction), or None."""
    if mixture.correction is not None and not isinstance(mixture.correction, nn.Parameter):
        mixture = replace(mixture, correction=None)
    weights = [t for t in (mixture.previous, mixture.next, mixture.correction) if t is not None]
    if not weights:
        return None
    first = weights[0]
    if mixture.previous is None and mixture.next is None:
        return None
    if first.dtype not in _KNOWN:
        return None
    if any(t.dtype is not first.dtype or t.stride() != first.stride() for t in weights[1:]):
        return None
    if any(c is not None and not c.is_contiguous() for c in (mixture.a, mixture.b)):
        return None
    return mixture if rows_are_dense(first) else None


def mix(mixtures: Sequence[Mixture], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Synthesize mixtures whose sources share a dtype, in one launch, with gradients."""
    return mix_batch(Batch.of(mixtures), dtype)


def mix_batch(batch: Batch, dtype: torch.dtype) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = _Mix.apply(batch, dtype, *batch.tensors)  # type: ignore[no-untyped-call]
    return made


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: Batch, dtype: torch.dtype, *tensors: Tensor) -> Any:
        out = torch.empty(batch.sizes.weights, dtype=dtype, device=batch.device)
        if batch.tables is not None:
            kernels().launch_forward(batch.tables, out, batch.source, batch.block)
        else:
            out.zero_()  # in place of the launch on fake tensors
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
        flat = gather(batch.layouts, grads)
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
        ends = None
        if batch.tables is not None:
            given = flat, partials, sources, corrections
            kernels().launch_backward(batch.tables, *given, batch.source, batch.block)
            ends = batch.tables[-1]
        by_row, by_head = batch.coefficients.gradients(partials, ends)
        found: list[Tensor | None] = []
        coefficients = count()
        for (number, role), needs in zip(batch.places, needed, strict=True):
            layout = batch.layouts[number]
            if role in (A, B):
                each = (by_row if batch.along[number] == "rows" else by_head)[next(coefficients)]
                found.append(each if needs else None)
            elif not needs:
                found.append(None)
            elif role == CORRECTION:
                found.append(layout.view(corrections, layout.start))
            else:
                found.append(layout.view(sources, layout.sources[role]))
        for pairs in batch.again:
            add_together(found, pairs)
        return (None, None, *found)


def add_together(found: list[Tensor | None], pairs: Sequence[tuple[int, int]]) -> None:
    """Add the gradients of tensors that are used twice, in one launch."""
    both = [(one, other) for i, j in pairs if (one := found[i]) is not None and (other := found[j]) is not None]
    if both:
        torch._foreach_add_([one for one, _ in both], [other for _, other in both])
    for first, again in pairs:
        if found[first] is None:
            found[first] = found[again]
        found[again] = None


@cache
def kernels() -> Any:
    """Imported on first use: Triton is optional."""
    from . import _triton

    return _triton


def gather(layouts: Sequence[Layout], grads: tuple[Tensor | None, ...]) -> Tensor:
    """All gradients in one buffer with the layout of the weights, in one launch."""
    if len(layouts) == 1 and grads[0] is not None:
        alone = layouts[0].flat(grads[0])
        return alone if not has_memory(alone) or is_aligned(alone) else alone.clone()
    like = next(grad for grad in grads if grad is not None)
    pieces, end = [], 0
    for layout, grad in zip(layouts, grads, strict=True):
        if layout.start > end:  # padding
            pieces.append(like.new_zeros(layout.start - end))
        count = layout.rows * layout.columns
        pieces.append(like.new_zeros(count) if grad is None else layout.flat(grad))
        end = layout.start + count
    return torch.cat(pieces)
