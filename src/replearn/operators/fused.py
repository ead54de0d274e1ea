"""Synthesis in one Triton kernel each way, for any number of mixtures at once.

A program makes one row of one weight. What belongs to which program stands in two tables on the device: a line of
addresses and sizes for each mixture, and the mixture and row of each program. Parameters stay where they are from
step to step, so the tables are made once and found again. `Mixture.plain` is the reference that this must equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..transforms import transformed
from .mixture import Made, Mixture, Mixtures
from .synthesis import full_precision

_KNOWN = (torch.float32, torch.bfloat16, torch.float16)
_KEPT_TABLES = 256
_ALIGNED = 64  # elements: every weight starts on a boundary that cuDNN and cuBLAS like
Tables = tuple[Tensor, Tensor, Tensor]
_tables: OrderedDict[tuple[Any, ...], Tables] = OrderedDict()


def synthesize(mixtures: Mixtures, dtype: torch.dtype) -> Made:
    """Make every mixture in this dtype: in one kernel on a GPU, in plain torch elsewhere."""
    wanted = {name: mixture for name, mixture in mixtures.items() if mixture is not None}
    if not wanted:
        return {}
    device = next(iter(wanted.values())).tensors[0].device
    if device.type == "cuda" and not torch.compiler.is_compiling():
        return synthesize_fused(wanted, dtype)
    with full_precision(device):
        return {name: mixture.plain().to(dtype) for name, mixture in wanted.items()}


def synthesize_fused(mixtures: Mapping[str, Mixture], dtype: torch.dtype) -> Made:
    """Make the mixtures together; those that the kernel does not know are made in plain torch."""
    known = {} if transformed() else {n: ready for n, m in mixtures.items() if (ready := fusable(m)) is not None}
    made: Made = {}
    groups: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name, mixture in known.items():
        # a correction that was computed just now (low rank) has no lasting address: it is added afterwards
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
    """What the kernel can make of a mixture (all of it, or all but its correction), or None."""
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


def rows_are_dense(weight: Tensor) -> bool:
    """Whether each output row is one run of memory, and the rows follow one another."""
    if weight.is_contiguous():
        return weight.numel() > 0
    if weight.dim() < 2:
        return False
    if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
        return True
    columns = weight[0].numel()
    if weight.stride(0) != columns or not weight.numel():
        return False
    # the row itself may be permuted (channels_last), but must fill its memory without gaps
    expected = 1
    for stride, size in sorted(zip(weight.stride()[1:], weight.shape[1:], strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def source_dtype(mixture: Mixture) -> torch.dtype:
    first = mixture.previous if mixture.previous is not None else mixture.next
    return first.dtype if first is not None else torch.float32


@dataclass(frozen=True, slots=True)
class Layout:
    """Where one mixture's results lie in the buffers that all of them share."""

    shape: torch.Size
    stride: tuple[int, ...]
    rows: int
    columns: int
    heads: int
    start: int  # of the weight
    partial: int  # of its coefficients' gradients: rows x heads numbers

    def view(self, buffer: Tensor) -> Tensor:
        return buffer.as_strided(self.shape, self.stride, self.start)

    def flat(self, tensor: Tensor) -> Tensor:
        """A tensor of this shape as a line of memory, in the order of the sources."""
        if tensor.stride() != self.stride:
            tensor = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device).copy_(
                tensor
            )
        return tensor.as_strided((self.rows * self.columns,), (1,))


def lay_out(mixtures: Sequence[Mixture]) -> tuple[list[Layout], int, int]:
    """A place for every mixture, and the sizes of the shared buffers."""
    layouts, start, partial = [], 0, 0
    for mixture in mixtures:
        weight = mixture.previous if mixture.previous is not None else mixture.next
        assert weight is not None  # `fusable` has seen to it
        rows = weight.shape[0] if weight.dim() > 1 else 1
        columns = weight.numel() // rows
        coefficient = mixture.a if mixture.a is not None else mixture.b
        heads = coefficient.numel() if mixture.along == "heads" and coefficient is not None else 1
        layouts.append(Layout(weight.shape, weight.stride(), rows, columns, heads, start, partial))
        start += -(-rows * columns // _ALIGNED) * _ALIGNED
        partial += rows * heads
    return layouts, start, partial


def tables_for(mixtures: Sequence[Mixture], layouts: Sequence[Layout], device: torch.device) -> Tables:
    """The kernel's tables on the device: numbers and addresses, factors, and who makes which row."""
    lines = tuple(
        (
            *(0 if t is None else t.data_ptr() for t in (m.previous, m.next, m.correction, m.a, m.b)),
            layout.start,
            layout.columns,
            layout.heads,
            layout.columns // layout.heads,
            int(m.along == "rows"),
            int(m.normalise),
            layout.partial,
        )
        for m, layout in zip(mixtures, layouts, strict=True)
    )
    factors = tuple((m.factor, m.scale) for m in mixtures)
    key = (device, lines, factors, tuple(layout.rows for layout in layouts))
    found = _tables.get(key)
    if found is None:
        numbers = torch.arange(len(layouts), dtype=torch.int32)
        rows = torch.tensor([layout.rows for layout in layouts])
        owners = numbers.repeat_interleave(rows)
        inside = torch.cat([torch.arange(int(count), dtype=torch.int32) for count in rows])
        owned = torch.stack([owners, inside], dim=1)
        found = torch.tensor(lines).to(device), torch.tensor(factors).to(device), owned.to(device)
        _tables[key] = found
        while len(_tables) > _KEPT_TABLES:
            _tables.popitem(last=False)
    else:
        _tables.move_to_end(key)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Mixtures for one launch, whose sources share a dtype, with all that can be worked out beforehand."""

    tensors: tuple[Tensor | None, ...]  # five a mixture: previous, next, correction, a, b
    along: tuple[str, ...]
    layouts: tuple[Layout, ...]
    size: int
    partials: int
    source: torch.dtype
    device: torch.device
    tables: Tables | None  # None where there is nothing behind the tensors

    @classmethod
    def of(cls, mixtures: Sequence[Mixture]) -> Batch:
        tensors = tuple(t for m in mixtures for t in (m.previous, m.next, m.correction, m.a, m.b))
        layouts, size, partials = lay_out(mixtures)
        first = mixtures[0].tensors[0]
        tables = tables_for(mixtures, layouts, first.device) if has_values(first) else None
        along = tuple(m.along for m in mixtures)
        source = source_dtype(mixtures[0])
        return cls(tensors, along, tuple(layouts), size, partials, source, first.device, tables)


def mix(mixtures: Sequence[Mixture], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Make mixtures whose sources share a dtype, in one launch, with gradients."""
    return mix_batch(Batch.of(mixtures), dtype)


def mix_batch(batch: Batch, dtype: torch.dtype) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = _Mix.apply(batch, dtype, *batch.tensors)  # type: ignore[no-untyped-call]
    return made


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: Batch, dtype: torch.dtype, *tensors: Tensor | None) -> Any:
        out = torch.empty(batch.size, dtype=dtype, device=batch.device)
        if batch.tables is not None:
            from .kernels.mixing import launch_forward

            launch_forward(batch.tables, out, batch.source, batch.layouts)
        else:
            out.zero_()  # stands for the launch where costs are predicted from shapes
        ctx.batch = batch
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)  # autograd then notices if one is changed before the backward pass
        return tuple(layout.view(out) for layout in batch.layouts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  raises if a source was changed in place
        batch: Batch = ctx.batch
        layouts, needed = batch.layouts, ctx.needs_input_grad[2:]
        given = [grad for grad in grads if grad is not None]
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        flat = gather(layouts, grads, batch.size, given[0])
        wants_sources = any(needed[0::5]) or any(needed[1::5])
        wants_corrections = any(needed[2::5])

        def room(wanted: bool) -> Tensor:
            return torch.empty(batch.size, dtype=batch.source, device=flat.device) if wanted else flat

        sources, corrections = [room(wants_sources), room(wants_sources)], room(wants_corrections)
        partials = torch.empty(2, batch.partials, device=flat.device)
        if batch.tables is not None:
            from .kernels.mixing import launch_backward

            launch_backward(
                batch.tables, flat, partials, sources, corrections, batch.source, layouts,
                wants_sources=wants_sources, wants_corrections=wants_corrections,
            )  # fmt: skip
        else:
            partials.zero_()
        found: list[Tensor | None] = [None] * len(needed)
        for index, (layout, along) in enumerate(zip(layouts, batch.along, strict=True)):
            for place, buffer in enumerate((*sources, corrections)):
                if needed[5 * index + place]:
                    found[5 * index + place] = layout.view(buffer)
            for side in range(2):
                if needed[5 * index + 3 + side]:
                    found[5 * index + 3 + side] = reduced(partials[side], layout, along)
        return (None, None, *found)


def has_values(tensor: Tensor) -> bool:
    """Whether there is memory behind a tensor that says it is on a GPU."""
    return type(tensor).__name__ != "FakeTensor"


def kernels_run_on(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_values(tensor)


def gather(layouts: Sequence[Layout], grads: tuple[Tensor | None, ...], size: int, like: Tensor) -> Tensor:
    """All gradients in one buffer, laid out as the weights were: one launch, as their addresses change."""
    if len(layouts) == 1 and grads[0] is not None:
        return layouts[0].flat(grads[0])
    pieces, end = [], 0
    zeros = None
    for layout, grad in zip(layouts, grads, strict=True):
        if layout.start > end or grad is None:
            zeros = like.new_zeros(size) if zeros is None else zeros
        if layout.start > end and zeros is not None:
            pieces.append(zeros[end : layout.start])
        count = layout.rows * layout.columns
        if grad is not None:
            pieces.append(layout.flat(grad))
        elif zeros is not None:
            pieces.append(zeros[:count])
        end = layout.start + count
    return torch.cat(pieces)


def reduced(partials: Tensor, layout: Layout, along: str) -> Tensor:
    """A coefficient's gradient from what each row gave."""
    mine = partials[layout.partial : layout.partial + layout.rows * layout.heads]
    if along == "rows":
        return mine
    return mine.sum().view(1) if along == "all" else mine.view(layout.rows, layout.heads).sum(0)
