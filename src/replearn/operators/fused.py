"""Synthesis in one Triton kernel each way, for any number of mixtures at once.

A program makes one row of one weight. What belongs to which program stands in two tables on the device: a line of
addresses and sizes for each mixture, and the mixture and row of each program. Parameters stay where they are from
step to step, so the tables are made once and found again. `Mixture.plain` is the reference that this must equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..transforms import transformed
from .mixture import Made, Mixture, Mixtures
from .synthesis import full_precision

_KNOWN = (torch.float32, torch.bfloat16, torch.float16)
_KEPT_TABLES = 256
_ALIGNED = 64  # elements: every weight starts on a boundary that cuDNN and cuBLAS like
_COEFFICIENTS = (3, 4)  # their places among a mixture's tensors
Tables = tuple[Tensor, Tensor, Tensor, Tensor]
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
    sources: tuple[int, int]  # of the gradients of previous and next
    partials: tuple[int, int]  # of those of a and b, from each row: heads x rows numbers

    def view(self, buffer: Tensor, start: int) -> Tensor:
        return buffer.as_strided(self.shape, self.stride, start)

    def flat(self, tensor: Tensor) -> Tensor:
        """A tensor of this shape as a line of memory, in the order of the sources."""
        if tensor.stride() != self.stride and not self.is_order_of(tensor):
            made = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device)
            tensor = made.copy_(tensor)
        return tensor.as_strided((self.rows * self.columns,), (1,))

    def is_order_of(self, tensor: Tensor) -> bool:
        """Whether strides differ only where there is nothing to step over, as in a 1x1 kernel."""
        steps = zip(self.shape, self.stride, tensor.stride(), strict=True)
        return all(own == other for size, own, other in steps if size != 1)


class Sizes(NamedTuple):
    """Of the shared buffers, in elements."""

    weights: int
    sources: int
    partials: int


def lay_out(mixtures: Sequence[Mixture]) -> tuple[list[Layout], Sizes]:
    """A place for every mixture, and the sizes of the shared buffers."""
    layouts, start, source, partial = [], 0, 0, 0
    for mixture in mixtures:
        weight = mixture.previous if mixture.previous is not None else mixture.next
        assert weight is not None  # `fusable` has seen to it
        rows = weight.shape[0] if weight.dim() > 1 else 1
        columns = weight.numel() // rows
        coefficient = mixture.a if mixture.a is not None else mixture.b
        heads = coefficient.numel() if mixture.along == "heads" and coefficient is not None else 1
        room = -(-rows * columns // _ALIGNED) * _ALIGNED
        sources = source, source + room * (mixture.previous is not None)
        partials = partial, partial + rows * heads * (mixture.a is not None)
        layouts.append(Layout(weight.shape, weight.stride(), rows, columns, heads, start, sources, partials))
        start += room
        source = sources[1] + room * (mixture.next is not None)
        partial = partials[1] + rows * heads * (mixture.b is not None)
    return layouts, Sizes(start, source, partial)


def tables_for(mixtures: Sequence[Mixture], layouts: Sequence[Layout], device: torch.device) -> Tables:
    """What kernels read on the device: numbers and addresses, factors, who makes which row, and what is summed."""
    lines = tuple(
        (
            *(0 if t is None else t.data_ptr() for t in places_of(m)),
            layout.start,
            layout.columns,
            layout.heads,
            layout.columns // layout.heads,
            int(m.along == "rows"),
            int(m.normalise),
            layout.rows,
            *layout.partials,
            *layout.sources,
        )
        for m, layout in zip(mixtures, layouts, strict=True)
    )
    factors = tuple((m.factor, m.scale) for m in mixtures)
    key = (device, lines, factors)
    found = _tables.get(key)
    if found is None:
        numbers = torch.arange(len(layouts), dtype=torch.int32)
        rows = torch.tensor([layout.rows for layout in layouts])
        owners = numbers.repeat_interleave(rows)
        inside = torch.cat([torch.arange(int(count), dtype=torch.int32) for count in rows])
        owned = torch.stack([owners, inside], dim=1)
        made = torch.tensor(lines), torch.tensor(factors), owned, torch.tensor(ends_of_sums(mixtures, layouts))
        one, two, three, four = (table.to(device) for table in made)
        found = _tables[key] = one, two, three, four
        while len(_tables) > _KEPT_TABLES:
            _tables.popitem(last=False)
    else:
        _tables.move_to_end(key)
    return found


def ends_of_sums(mixtures: Sequence[Mixture], layouts: Sequence[Layout]) -> list[int]:
    """Where the sum of each head of each coefficient begins among the partial ones, and the last ends."""
    found = [0]
    for mixture, layout in zip(mixtures, layouts, strict=True):
        for _ in range(layout.heads * num_coefficients(mixture)):
            found.append(found[-1] + layout.rows)
    return found


def num_coefficients(mixture: Mixture) -> int:
    return (mixture.a is not None) + (mixture.b is not None)


def places_of(mixture: Mixture) -> tuple[Tensor | None, ...]:
    return mixture.previous, mixture.next, mixture.correction, mixture.a, mixture.b


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Mixtures for one launch, whose sources share a dtype, with all that can be worked out beforehand.

    In eager training the GPU waits for Python, so what is done at every step is kept short.
    """

    tensors: tuple[Tensor, ...]  # all that is read, mixture by mixture
    places: tuple[tuple[int, int], ...]  # of each: its mixture, and which of the five it is
    watched: tuple[Tensor, ...]  # those whose values the backward pass reads again
    along: tuple[str, ...]
    layouts: tuple[Layout, ...]
    sizes: Sizes
    block: int
    source: torch.dtype
    device: torch.device
    tables: Tables | None  # None where there is nothing behind the tensors
    coefficients: Coefficients

    @classmethod
    def of(cls, mixtures: Sequence[Mixture]) -> Batch:
        found = [(t, (n, k)) for n, m in enumerate(mixtures) for k, t in enumerate(places_of(m)) if t is not None]
        layouts, sizes = lay_out(mixtures)
        device = found[0][0].device
        return cls(
            tensors=tuple(tensor for tensor, _ in found),
            places=tuple(place for _, place in found),
            watched=tuple(tensor for m in mixtures if not m.only_cast for tensor in m.tensors),
            along=tuple(m.along for m in mixtures),
            layouts=tuple(layouts),
            sizes=sizes,
            block=block_for(layouts),
            source=source_dtype(mixtures[0]),
            device=device,
            tables=tables_for(mixtures, layouts, device) if has_values(found[0][0]) else None,
            coefficients=Coefficients.of(mixtures, layouts),
        )


@dataclass(frozen=True, slots=True)
class Coefficients:
    """How the coefficients' gradients come out of what each row gave: all sums in one launch."""

    numbers: tuple[int, ...]  # that each coefficient has of them, in turn
    counts: tuple[int, ...]  # of sums of each
    summed: bool  # or each has one for every row, as it is

    @classmethod
    def of(cls, mixtures: Sequence[Mixture], layouts: Sequence[Layout]) -> Coefficients:
        pairs = zip(mixtures, layouts, strict=True)
        owners = [(m.along, layout) for m, layout in pairs for _ in range(num_coefficients(m))]
        return cls(
            numbers=tuple(layout.rows * layout.heads for _, layout in owners),
            counts=tuple(layout.heads for _, layout in owners),
            summed=any(along != "rows" for along, _ in owners),
        )

    def gradients(self, partials: Tensor, ends: Tensor | None) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Of each coefficient in turn: for rows, and for heads or all; which it is, its mixture says."""
        rows = partials.split_with_sizes(self.numbers)
        if not self.summed:
            return rows, ()
        if ends is None:  # nothing behind them: shapes alone
            return rows, partials.new_zeros(sum(self.counts)).split_with_sizes(self.counts)
        sums = torch.segment_reduce(partials, "sum", offsets=ends, unsafe=True)
        return rows, sums.split_with_sizes(self.counts)


def mix(mixtures: Sequence[Mixture], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Make mixtures whose sources share a dtype, in one launch, with gradients."""
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
            out.zero_()  # stands for the launch where costs are predicted from shapes
        ctx.batch = batch
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*batch.watched)  # autograd then notices if one is changed before the backward pass
        return tuple([layout.view(out, layout.start) for layout in batch.layouts])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.saved_tensors  # noqa: B018  raises if a source was changed in place
        batch: Batch = ctx.batch
        needed = ctx.needs_input_grad[2:]
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        flat = gather(batch.layouts, grads)
        wanted = {kind for (_, kind), needs in zip(batch.places, needed, strict=True) if needs}

        def room(*kinds: int, size: int) -> Tensor | None:
            some = not wanted.isdisjoint(kinds)
            return torch.empty(size, dtype=batch.source, device=batch.device) if some else None

        sources = room(0, 1, size=batch.sizes.sources)
        corrections = room(2, size=batch.sizes.weights)
        partials = torch.empty(batch.sizes.partials, device=batch.device)
        ends = None
        if batch.tables is not None:
            given = flat, partials, sources, corrections
            kernels().launch_backward(batch.tables, *given, batch.source, batch.block)
            ends = batch.tables[-1]
        some = not wanted.isdisjoint(_COEFFICIENTS)
        by_row, by_head = batch.coefficients.gradients(partials, ends) if some else ((), ())
        found: list[Tensor | None] = []
        coefficient = 0
        for (number, kind), needs in zip(batch.places, needed, strict=True):
            layout = batch.layouts[number]
            if not needs:
                found.append(None)
            elif kind in _COEFFICIENTS:
                found.append((by_row if batch.along[number] == "rows" else by_head)[coefficient])
            elif kind == 2 and corrections is not None:
                found.append(layout.view(corrections, layout.start))
            elif sources is not None:
                found.append(layout.view(sources, layout.sources[kind]))
            coefficient += kind in _COEFFICIENTS
        return (None, None, *found)


@cache
def kernels() -> Any:
    """The module with the kernels; Triton need not be there where it is not used."""
    from .kernels import mixing

    return mixing


def block_for(layouts: Sequence[Layout]) -> int:
    """Columns that a program takes at a time: a power of two."""
    widest = max(layout.columns // layout.heads for layout in layouts)
    return max(16, min(1024, 1 << (widest - 1).bit_length()))


def has_values(tensor: Tensor) -> bool:
    """Whether there is memory behind a tensor that says it is on a GPU."""
    return type(tensor).__name__ != "FakeTensor"


def kernels_run_on(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_values(tensor)


def gather(layouts: Sequence[Layout], grads: tuple[Tensor | None, ...]) -> Tensor:
    """All gradients in one buffer, laid out as the weights were: one launch, as their addresses change."""
    if len(layouts) == 1 and grads[0] is not None:
        alone = layouts[0].flat(grads[0])
        even = not has_values(alone) or alone.data_ptr() % 16 == 0
        return alone if even else alone.clone()  # a part of a tensor may begin anywhere
    like = next(grad for grad in grads if grad is not None)
    pieces, end = [], 0
    for layout, grad in zip(layouts, grads, strict=True):
        if layout.start > end:  # every weight begins on a boundary
            pieces.append(like.new_zeros(layout.start - end))
        count = layout.rows * layout.columns
        pieces.append(like.new_zeros(count) if grad is None else layout.flat(grad))
        end = layout.start + count
    return torch.cat(pieces)
