"""Mixtures for one launch, their layout in shared buffers, and the tables on the device.

A program of the kernels computes one row of one weight. The tables hold addresses and sizes of each mixture, and
the mixture and row of each program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...operators._base.mixture import Mixture

_ALIGNED = 64  # elements, as cuDNN and cuBLAS prefer
Tables = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides and offsets of one mixture in the shared buffers."""

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

    def coefficient_grad(self, partials: Tensor, start: int, along: str) -> Tensor:
        """The gradient of a coefficient from those of its rows; one along the rows has each for itself."""
        found = partials.narrow(0, start, self.heads * self.rows)
        return found if along == "rows" else found.view(self.heads, self.rows).sum(1)


class Sizes(NamedTuple):
    """Elements of the shared buffers."""

    weights: int
    sources: int
    partials: int


class Batch:
    """Mixtures for one launch, whose sources share a dtype, with everything that is the same in every step."""

    def __init__(self, mixtures: Sequence[Mixture]) -> None:
        found = [(t, (n, k)) for n, m in enumerate(mixtures) for k, t in enumerate(m.places) if t is not None]
        self.tensors = tuple(tensor for tensor, _ in found)  # of all mixtures, in order
        self.places = [place for _, place in found]  # (mixture, position in it) of each tensor
        # those whose values backward reads
        self.watched = [tensor for m in mixtures if not m.is_a_cast for tensor in m.tensors]
        self.along = [m.along for m in mixtures]
        self.layouts, self.sizes = lay_out(mixtures)
        self.block = block_for(self.layouts)
        self.source, self.device = source_of(mixtures[0]).dtype, self.tensors[0].device
        self.tables = tables_for(mixtures, self.layouts, self.device)


def tables_for(mixtures: Sequence[Mixture], layouts: Sequence[Layout], device: torch.device) -> Tables:
    """Addresses and sizes, factors, and the row of each program."""
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
    rows = tuple(layout.rows for layout in layouts)
    return tables_on(device, lines, factors, rows)


@lru_cache(maxsize=256)  # a captured step reads the same tables at every replay
def tables_on(device: torch.device, lines: Any, factors: Any, rows: tuple[int, ...]) -> Tables:
    owners = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(torch.tensor(rows))
    inside = torch.cat([torch.arange(count, dtype=torch.int32) for count in rows])
    made = torch.tensor(lines), torch.tensor(factors, dtype=torch.float32), torch.stack([owners, inside], dim=1)
    one, two, three = (table.to(device) for table in made)
    return one, two, three


def block_for(layouts: Sequence[Layout]) -> int:
    """Columns of a tile: a power of two."""
    widest = max(layout.columns // layout.heads for layout in layouts)
    return max(16, min(1024, 1 << (widest - 1).bit_length()))


def source_of(mixture: Mixture) -> Tensor:
    found = mixture.previous if mixture.previous is not None else mixture.next
    assert found is not None  # checked by `fusable`
    return found


def lay_out(mixtures: Sequence[Mixture]) -> tuple[list[Layout], Sizes]:
    """The layout of every mixture, and the sizes of the shared buffers."""
    layouts, start, source, partial = [], 0, 0, 0
    for mixture in mixtures:
        weight = source_of(mixture)
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


def rows_are_dense(weight: Tensor) -> bool:
    """True if rows are dense, as those of channels_last are, and follow one another in memory."""
    if weight.is_contiguous() or weight.dim() < 2 or not weight.numel():
        return weight.is_contiguous() and weight.numel() > 0
    row = weight[0]
    return weight.stride(0) == row.numel() and torch.empty_like(row).stride() == row.stride()
