"""Mixtures for one launch, with all that can be worked out before it.

A program of the kernels makes one row of one weight. What belongs to which program stands in tables on the device:
a line of addresses and sizes for each mixture, and the mixture and row of each program. Parameters stay where they
are from step to step, so the tables are made once and found again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...operators._base.mixture import Mixture
from ..kernels._dispatch import has_memory
from .layout import Layout, Sizes, lay_out

_KEPT_TABLES = 256
Tables = tuple[Tensor, Tensor, Tensor, Tensor]
_tables: OrderedDict[tuple[Any, ...], Tables] = OrderedDict()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Mixtures for one launch, whose sources share a dtype, with all that can be worked out beforehand.

    In eager training the GPU waits for Python, so what is done at every step is kept short.
    """

    tensors: tuple[Tensor, ...]  # all that is read, mixture by mixture
    places: tuple[tuple[int, int], ...]  # of each: its mixture, and its place in that
    watched: tuple[Tensor, ...]  # those whose values the backward pass reads again
    along: tuple[str, ...]
    layouts: tuple[Layout, ...]
    sizes: Sizes
    block: int
    source: torch.dtype
    device: torch.device
    tables: Tables | None  # None where there is nothing behind the tensors
    coefficients: Coefficients
    again: tuple[tuple[tuple[int, int], ...], ...]  # see `first_and_again`

    @classmethod
    def of(cls, mixtures: Sequence[Mixture]) -> Batch:
        found = [(t, (n, k)) for n, m in enumerate(mixtures) for k, t in enumerate(m.places) if t is not None]
        layouts, sizes = lay_out(mixtures)
        device = found[0][0].device
        return cls(
            tensors=tuple(tensor for tensor, _ in found),
            places=tuple(place for _, place in found),
            watched=tuple(tensor for m in mixtures if not m.is_a_cast for tensor in m.tensors),
            along=tuple(m.along for m in mixtures),
            layouts=tuple(layouts),
            sizes=sizes,
            block=block_for(layouts),
            source=source_dtype(mixtures[0]),
            device=device,
            tables=tables_for(mixtures, layouts, device) if has_memory(found[0][0]) else None,
            coefficients=Coefficients.of(mixtures, layouts),
            again=first_and_again([tensor for tensor, _ in found]),
        )


def first_and_again(tensors: Sequence[Tensor]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Where a tensor stands for the first time, and where again; in groups that have each tensor once."""
    seen: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        seen.setdefault(id(tensor), []).append(place)
    most = max(len(places) for places in seen.values())
    return tuple(
        tuple((places[0], places[time]) for places in seen.values() if len(places) > time)
        for time in range(1, most)
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
        rows = partials.split_with_sizes(self.numbers) if self.numbers else ()
        if not self.summed:
            return rows, ()
        if ends is None:  # nothing behind them: shapes alone
            return rows, partials.new_zeros(sum(self.counts)).split_with_sizes(self.counts)
        sums = torch.segment_reduce(partials, "sum", offsets=ends, unsafe=True)
        return rows, sums.split_with_sizes(self.counts)


def tables_for(mixtures: Sequence[Mixture], layouts: Sequence[Layout], device: torch.device) -> Tables:
    """What kernels read on the device: numbers and addresses, factors, who makes which row, and what is summed."""
    lines = tuple(
        (
            *(0 if t is None else t.data_ptr() for t in m.places),
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
        ends = torch.tensor(ends_of_sums(mixtures, layouts))
        made = torch.tensor(lines), torch.tensor(factors, dtype=torch.float32), owned, ends
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


def block_for(layouts: Sequence[Layout]) -> int:
    """Columns that a program takes at a time: a power of two."""
    widest = max(layout.columns // layout.heads for layout in layouts)
    return max(16, min(1024, 1 << (widest - 1).bit_length()))


def source_dtype(mixture: Mixture) -> torch.dtype:
    first = mixture.previous if mixture.previous is not None else mixture.next
    return first.dtype if first is not None else torch.float32
