"""What a data set is to the engine: small ones are tensors, large ones are streams."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ....errors import ReplearnError

IGNORED = -100  # the label of a filler image; cross_entropy leaves it out by default


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A whole data set in memory: uint8 images (N, C, H, W) and int64 labels, training and test."""

    name: str
    num_classes: int
    train_images: Tensor = field(repr=False)
    train_labels: Tensor = field(repr=False)
    test_images: Tensor = field(repr=False)
    test_labels: Tensor = field(repr=False)
    mean: tuple[float, ...]  # per channel, of the training images scaled to 0..1
    std: tuple[float, ...]

    unit = "images"  # what is counted, and what the classes are
    classes = "classes"

    @property
    def channels(self) -> int:
        return int(self.train_images.shape[1])

    @property
    def size(self) -> int:
        return int(self.train_images.shape[2])

    @property
    def num_train(self) -> int:
        return int(self.train_labels.shape[0])

    @property
    def num_test(self) -> int:
        return int(self.test_labels.shape[0])

    def with_classes(self, classes: Sequence[int]) -> ImageSet:
        """Only the images of these classes, numbered anew from 0 in the order given; mean and std stay."""
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

    def subset(self, num_train: int, num_test: int, seed: int = 0) -> ImageSet:
        """A smaller set for quick tests, the same one every time: classes as even as they can be.

        A smaller subset is part of a larger one of the same seed. Mean and std stay those of the
        whole set, so that a model trained on all of it still fits.
        """
        for asked, held, which in ((num_train, self.num_train, "training"), (num_test, self.num_test, "test")):
            if not 1 <= asked <= held:
                raise ReplearnError(
                    f"A subset of {self.name} with {asked} {which} images can't be made: "
                    f"it has {held}; write a number from 1 to {held}."
                )
        train = stratified_order(self.train_labels, seed)[:num_train]
        test = stratified_order(self.test_labels, seed)[:num_test]
        return replace(
            self,
            train_images=self.train_images[train],
            train_labels=self.train_labels[train],
            test_images=self.test_images[test],
            test_labels=self.test_labels[test],
        )


def default_workers() -> int:
    """As many worker processes as this process may use cores, and not more than eight."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamedSet(ABC):
    """A data set too large for memory: batches of uint8 images (B, C, size, size) and int64 labels.

    `batch_size` is that of all processes together; each gets its equal part. Other settings:
    `dataclasses.replace(stream, size=160, rand_augment=True)`.
    """

    name: str
    num_classes: int
    num_train: int
    num_test: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    channels: int = 3
    size: int = 224
    rand_augment: bool = False
    workers: int = field(default_factory=default_workers)  # 0: read in this process

    unit = "images"
    classes = "classes"

    def steps(self, batch_size: int) -> int:
        """Training batches in an epoch; a last one that would not be full is left out."""
        if not 1 <= batch_size <= self.num_train:
            raise ReplearnError(
                f"A batch of {batch_size} can't be drawn from {self.name}, which has {self.num_train} training "
                f"images; write a batch size from 1 to {self.num_train}."
            )
        return self.num_train // batch_size

    @abstractmethod
    def train_batches(
        self, epoch: int, seed: int, rank: int = 0, world_size: int = 1, batch_size: int = 256, first: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch's augmented batches from number `first` on; the same for the same (seed, epoch)."""

    @abstractmethod
    def test_batches(
        self, rank: int = 0, world_size: int = 1, batch_size: int = 256
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Every test image once, over all processes together.

        Each process gets the same number of batches, so that sharded models stay in step; images
        that only fill up are labelled IGNORED: count `labels >= 0`.
        """

    @abstractmethod
    def part(self, num_train: int, num_test: int, seed: int = 0) -> ImageSet:
        """So many images in memory, not augmented; classes as even as they can be, always the same ones."""


def share_of(batch_size: int, rank: int, world_size: int) -> int:
    """How many images of a batch one process gets; ReplearnError where that is no whole number."""
    if not 0 <= rank < world_size:
        raise ReplearnError(f"There is no process {rank} among {world_size}; ranks go from 0 to {world_size - 1}.")
    if batch_size < 1 or batch_size % world_size:
        raise ReplearnError(
            f"A batch of {batch_size} can't be divided among {world_size} processes; write a batch size that is "
            f"a multiple of {world_size}."
        )
    return batch_size // world_size


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
