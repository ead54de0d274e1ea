"""Batches for training steps, drawn at random from calibration samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..blocks.running import cut
from .batches import Batch

PART = 64  # samples in a step


class Pool:
    """Random steps' batches of at most 64 samples, drawn from all samples where batches can be joined."""

    def __init__(self, batches: Sequence[Batch], device: torch.device) -> None:
        self.joined = joined(batches, device)
        self.parts = [part for batch in batches for part in parts(batch)] if self.joined is None else []
        self.random = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
        self._order = torch.empty(0, dtype=torch.long)

    def __len__(self) -> int:
        """Steps in an epoch."""
        return len(self.parts) if self.joined is None else math.ceil(self.joined.size / PART)

    @property
    def least(self) -> int:
        """The samples of the smallest batch."""
        return min(PART, self.joined.size) if self.joined else min(part.size for part in self.parts)

    def draw(self) -> Batch:
        if self.joined is None:
            return self.parts[int(torch.randint(len(self.parts), (), generator=self.random))]
        size = min(PART, self.joined.size)
        if len(self._order) < size:
            self._order = torch.randperm(self.joined.size, generator=self.random)
            self._order = self._order.to(tree_flatten(self.joined.inputs)[0][0].device)
        at, self._order = self._order[:size], self._order[size:]
        return Batch(tree_map(lambda leaf: leaf[at], self.joined.inputs), False, size)


def joined(batches: Sequence[Batch], device: torch.device) -> Batch | None:
    """All samples in one batch; None where batches differ in shape or hold other things than samples."""
    leaves = [tree_flatten(batch.inputs) for batch in batches]
    if len({str(spec) for _, spec in leaves}) > 1:
        return None
    made = []
    for column in zip(*(found for found, _ in leaves), strict=True):
        pairs = zip(column, batches, strict=True)
        whole = all(isinstance(t, Tensor) and t.dim() > 0 and len(t) == batch.size for t, batch in pairs)
        if not whole or len({(t.shape[1:], t.dtype, t.device) for t in column}) > 1:
            return None
        made.append(torch.cat([tensor.to(device) for tensor in column]))
    if not made:
        return None
    return Batch(tree_unflatten(made, leaves[0][1]), False, sum(batch.size for batch in batches))


def parts(batch: Batch) -> list[Batch]:
    """A batch in equal parts of at most 64 samples: small steps, and more of them."""
    number = math.ceil(batch.size / PART)
    edges = [batch.size * i // number for i in range(number + 1)]
    return [Batch(cut(batch.inputs, batch.size, i, j), False, j - i) for i, j in pairwise(edges)]
