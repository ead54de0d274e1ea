"""Image sets that fit in memory, as tensors."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ....errors import ReplearnError
from .source import Counted

IGNORED = -100  # the label of a filler image; cross_entropy leaves it out by default


@dataclass(frozen=True, eq=False)
class ImageSet(Counted):
    """A whole data set in memory: uint8 images (N, C, H, W) and int64 labels, training and test."""

    name: str
    num_classes: int
    train_images: Tensor = field(repr=False)
    train_labels: Tensor = field(repr=False)
    test_images: Tensor = field(repr=False)
    test_labels: Tensor = field(repr=False)
    mean: tuple[float, ...]  # per channel, of the training images scaled to 0..1
    std: tuple[float, ...]

    @property
    def channels(self) -> int:
        return int(self.train_images.shape[1])

    @property
    def size(self) -> int:
        return int(self.train_images.shape[2])

    @property
    def num_train(self) -> int:
        return len(self.train_labels)

    @property
    def num_test(self) -> int:
        return len(self.test_labels)

    def with_classes(self, classes: Sequence[int]) -> ImageSet:
        """The images of these classes alone, relabelled from 0 in the order given, with the same mean and std."""
        known = range(self.num_classes)
        if len(set(classes)) != len(classes) or len(classes) < 2 or not all(label in known for label in classes):
            raise ReplearnError(
                f"classes={list(classes)}: write at least two different classes of {self.name}, each from 0 to "
                f"{self.num_classes - 1}."
            )
        numbers = torch.full((self.num_classes,), -1)
        numbers[list(classes)] = torch.arange(len(classes))
        train, test = numbers[self.train_labels], numbers[self.test_labels]
        return replace(
            self,
            num_classes=len(classes),
            train_images=self.train_images[train >= 0],
            train_labels=train[train >= 0],
            test_images=self.test_images[test >= 0],
            test_labels=test[test >= 0],
        )


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 images, scaled to 0..1.

    Computed from a histogram, so that they do not depend on the machine or the number of threads.
    """
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = float(share @ levels)
        deviation = float(share @ (levels - mean).square()) ** 0.5
        means.append(mean)
        deviations.append(deviation or 1.0)  # a constant channel is only shifted
    return tuple(means), tuple(deviations)


def stratified_order(labels: Tensor, seed: int) -> Tensor:
    """Indices of all images, shuffled so that classes alternate and any prefix is balanced.

    Shuffled by a hash, since the numbers of a generator may change between library versions.
    """
    digests = [hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest() for index in range(len(labels))]
    shuffled = sorted(range(len(labels)), key=digests.__getitem__)
    seen: Counter[int] = Counter()
    turns = []
    for index, label in zip(shuffled, labels[shuffled].tolist(), strict=True):
        turns.append((seen[label], digests[index], index))
        seen[label] += 1
    return torch.tensor([index for _, _, index in sorted(turns)], dtype=torch.int64)
