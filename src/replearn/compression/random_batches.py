"""Random batches of calibration samples, for training steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..blocks.running import cut
from .batches import Batch

BATCH_SIZE = 64


class RandomBatches:
    """Draws batches of at most 64 samples: from all samples if these can be joined, else parts of the batches."""

    def __init__(self, batches: Sequence[Batch], device: torch.device) -> None:
        self.joined = join(batches, device)
        self.parts = [part for batch in batches for part in split(batch)] if self.joined is None else []
        self.random = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        self._order = torch.empty(0, dtype=torch.long)

    def __len__(self) -> int:
        """The number of steps in an epoch."""
        return len(self.parts) if self.joined is None else math.ceil(self.joined.size / BATCH_SIZE)

    @property
    def smallest(self) -> int:
        """The size of the smallest batch."""
        return min(BATCH_SIZE, self.joined.size) if self.joined else min(part.size for part in self.parts)

    def draw(self) -> Batch:
        if self.joined is None:
            return self.parts[int(torch.randint(len(self.parts), (), generator=self.random))]
        size = min(BATCH_SIZE, self.joined.size)
        if len(self._order) < size:
            self._order = torch.randperm(self.joined.size, generator=self.random)
            self._order = self._order.to(tree_flatten(self.joined.inputs)[0][0].device)
        index, self._order = self._order[:size], self._order[size:]
        return Batch(tree_map(lambda leaf: leaf[index], self.joined.inputs), False, size)


def join(batches: Sequence[Batch], device: torch.device) -> Batch | None:
    """All samples in one batch; None if the batches' shapes differ or they hold anything but samples."""
    leaves = [tree_flatten(batch.inputs) for batch in batches]
    if len({str(spec) for _, spec in leaves}) > 1:
        return None
    columns = []
    for column in zip(*(found for found, _ in leaves), strict=True):
        pairs = zip(column, batches, strict=True)
        rows = all(isinstance(t, Tensor) and t.dim() > 0 and len(t) == batch.size for t, batch in pairs)
        if not rows or len({(t.shape[1:], t.dtype, t.device) for t in column}) > 1:
            return None
        columns.append(torch.cat([tensor.to(device) for tensor in column]))
    if not columns:
        return None
    return Batch(tree_unflatten(columns, leaves[0][1]), False, sum(batch.size for batch in batches))


def split(batch: Batch) -> list[Batch]:
    """Split a batch into equal parts of at most 64 samples."""
    count = math.ceil(batch.size / BATCH_SIZE)
    edges = [batch.size * i // count for i in range(count + 1)]
    return [Batch(cut(batch.inputs, batch.size, i, j), False, j - i) for i, j in pairwise(edges)]
