"""An order of images that is the same for ever: on any machine, under any version of any library."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def stratified_order(labels: Tensor, seed: int) -> Tensor:
    """Indices of all images, shuffled, such that classes take turns: any beginning of it is balanced.

    Shuffled by a hash and not by a generator, whose stream a library may change from one version
    to the next; committed results must stay comparable.
    """
    digests = [hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest() for index in range(len(labels))]
    shuffled = sorted(range(len(labels)), key=digests.__getitem__)
    seen: dict[int, int] = {}
    turns = []
    for index, label in zip(shuffled, labels[shuffled].tolist(), strict=True):
        turns.append((seen.get(label, 0), digests[index], index))
        seen[label] = seen.get(label, 0) + 1
    return torch.tensor([index for _, _, index in sorted(turns)], dtype=torch.int64)
