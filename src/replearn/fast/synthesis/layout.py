"""Offsets of the weights and gradients of many mixtures in shared buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...operators._base.mixture import Mixture

_ALIGNED = 64  # elements, as cuDNN and cuBLAS prefer


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

    def flat(self, tensor: Tensor) -> Tensor:
        """A tensor of this shape as a 1d view, in the memory order of the sources."""
        if tensor.stride() != self.stride and not self.is_order_of(tensor):
            made = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device)
            tensor = made.copy_(tensor)
        return tensor.as_strided((self.rows * self.columns,), (1,))

    def is_order_of(self, tensor: Tensor) -> bool:
        """True if strides differ only in dimensions of size 1."""
        steps = zip(self.shape, self.stride, tensor.stride(), strict=True)
        return all(own == other for size, own, other in steps if size != 1)


class Sizes(NamedTuple):
    """Elements of the shared buffers."""

    weights: int
    sources: int
    partials: int


def lay_out(mixtures: Sequence[Mixture]) -> tuple[list[Layout], Sizes]:
    """The layout of every mixture, and the sizes of the shared buffers."""
    layouts, start, source, partial = [], 0, 0, 0
    for mixture in mixtures:
        weight = mixture.previous if mixture.previous is not None else mixture.next
        assert weight is not None  # checked by `fusable`
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
    """True if rows are dense and follow one another in memory."""
    if weight.is_contiguous():
        return weight.numel() > 0
    if weight.dim() < 2:
        return False
    if weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last):
        return True
    columns = weight[0].numel()
    if weight.stride(0) != columns or not weight.numel():
        return False
    # a row may be permuted (channels_last), without gaps
    expected = 1
    for stride, size in sorted(zip(weight.stride()[1:], weight.shape[1:], strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
