"""Batches for training steps, drawn at random from calibration samples."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .batches import Batch, cut

PART = 64  # samples in a step


class Pool:
    """Random steps' batches of at most 64 samples, drawn from all samples where batches can be joined."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.parts = [part for batch in batches for part in parts(batch)]
        self.joined = joined(batches)
        self.random = random.Random(0)
        self._order: list[int] = []

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def least(self) -> int:
        """The samples of the smallest batch."""
        return min(PART, self.joined.size) if self.joined else min(part.size for part in self.parts)

    def draw(self) -> Batch:
        if self.joined is None:
            return self.random.choice(self.parts)
        size = min(PART, self.joined.size)
        if len(self._order) < size:
            self._order = self.random.sample(range(self.joined.size), self.joined.size)
        at = torch.tensor([self._order.pop() for _ in range(size)])
        return Batch(pick(self.joined.inputs, at), False, size)


def joined(batches: Sequence[Batch]) -> Batch | None:
    """All samples in one batch; None where batches differ in shape or hold other things than samples."""
    leaves = [tree_flatten(batch.inputs) for batch in batches]
    made = []
    for column in zip(*(found for found, _ in leaves), strict=False):
        whole = all(rowed(tensor, batch) for tensor, batch in zip(column, batches, strict=True))
        if not whole or len({(t.shape[1:], t.dtype, t.device) for t in column}) > 1:
            return None
        made.append(torch.cat(list(column)))
    if len({str(spec) for _, spec in leaves}) > 1 or not made:
        return None
    return Batch(tree_unflatten(made, leaves[0][1]), False, sum(batch.size for batch in batches))


def rowed(value: Any, batch: Batch) -> bool:
    """True for a tensor with a row for each sample."""
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == batch.size


def pick(inputs: Any, at: Tensor) -> Any:
    return tree_map(lambda leaf: leaf[at.to(leaf.device)] if isinstance(leaf, Tensor) else leaf, inputs)


def parts(batch: Batch) -> list[Batch]:
    """A batch in equal parts of at most 64 samples: small steps, and more of them."""
    number = math.ceil(batch.size / PART)
    edges = [batch.size * i // number for i in range(number + 1)]
    return [Batch(cut(batch.inputs, batch.size, i, j), False, j - i) for i, j in pairwise(edges)]
