"""Streaming from class folders: train/CLASS/picture.JPEG and val/CLASS/picture.JPEG."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ....errors import ReplearnError
from ..seeds import seed_at
from .base import IGNORED, ImageSet, StreamedSet, share_of, stratified_order
from .pictures import SUFFIXES, picture, test_transform, train_transform

Key = tuple[int, int]  # an image's index, -1 for a filler, and the seed of its augmentation
Sample = tuple[Tensor, int] | str  # a str is what is wrong: a worker's own exception arrives as a wall of text


@dataclass(frozen=True, eq=False)
class Listing:
    """The pictures of a split. Names lie in one block of bytes, which worker processes share without copying."""

    folder: Path
    block: bytes = field(repr=False)
    ends: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def path(self, index: int) -> Path:
        begin = int(self.ends[index - 1]) if index else 0
        return self.folder / os.fsdecode(self.block[begin : int(self.ends[index])])


def class_folders(folder: Path) -> list[str]:
    """The classes of a split, in the order of their labels."""
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def list_pictures(folder: Path, classes: Sequence[str]) -> Listing:
    """Every picture of a split, sorted; ReplearnError for a class that has none."""
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        with os.scandir(folder / name) as entries:
            found = sorted(
                entry.name
                for entry in entries
                if entry.name.lower().rsplit(".", 1)[-1] in SUFFIXES and not entry.name.startswith(".")
            )
        if not found:
            raise ReplearnError(f"{folder / name} holds no picture ({', '.join(SUFFIXES)}).")
        names += [os.fsencode(f"{name}/{file}") for file in found]
        labels += [label] * len(found)
    ends = torch.tensor([len(name) for name in names]).cumsum(0)
    return Listing(folder, b"".join(names), ends, torch.tensor(labels))


class _Pictures(Dataset[Any]):
    """What a worker process does: one picture for one key."""

    def __init__(self, listing: Listing, size: int, train: bool, rand_augment: bool) -> None:
        self.listing, self.size, self.train, self.rand_augment = listing, size, train, rand_augment

    def __getitem__(self, key: Key) -> Sample:
        index, seed = key
        if index < 0:
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8), IGNORED
        path = self.listing.path(index)
        transform = train_transform(self.size, self.rand_augment) if self.train else test_transform(self.size)
        try:
            image = picture(path.read_bytes(), str(path), transform, seed)
        except (ReplearnError, OSError) as error:
            return str(error)
        return image, int(self.listing.labels[index])


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor] | str:
    good = [sample for sample in samples if not isinstance(sample, str)]
    if len(good) < len(samples):
        return next(sample for sample in samples if isinstance(sample, str))
    return torch.stack([image for image, _ in good]), torch.tensor([label for _, label in good])


@dataclass(frozen=True, eq=False, kw_only=True)
class FolderStream(StreamedSet):
    """The same (seed, epoch) gives the same batches for any number of workers, and of processes together."""

    train: Listing
    test: Listing

    def train_batches(
        self, epoch: int, seed: int, rank: int = 0, world_size: int = 1, batch_size: int = 256, first: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        share = share_of(batch_size, rank, world_size)
        steps = self.steps(batch_size)
        generator = torch.Generator().manual_seed(seed_at(seed, epoch, "order"))
        order = torch.randperm(len(self.train), generator=generator)
        mine = order[: steps * batch_size].reshape(steps, world_size, share)[first:, rank]
        batches = _Keys(mine, seed, epoch)
        return self._stream(_Pictures(self.train, self.size, True, self.rand_augment), batches)

    def test_batches(
        self, rank: int = 0, world_size: int = 1, batch_size: int = 256
    ) -> Iterator[tuple[Tensor, Tensor]]:
        share_of(batch_size, rank, world_size)
        batches = []
        for whole in torch.arange(len(self.test)).split(batch_size):
            share = -(-len(whole) // world_size)
            indices = whole[rank * share : (rank + 1) * share].tolist()
            batches.append([(index, 0) for index in indices + [-1] * (share - len(indices))])
        return self._stream(_Pictures(self.test, self.size, False, False), batches)

    def part(self, num_train: int, num_test: int, seed: int = 0) -> ImageSet:
        """So many pictures in memory, cropped as for testing."""
        halves: list[Tensor] = []
        for listing, count in ((self.train, num_train), (self.test, num_test)):
            chosen = stratified_order(listing.labels, seed)[:count]
            keys = [[(index, 0) for index in some.tolist()] for some in chosen.split(64)]
            read = list(self._stream(_Pictures(listing, self.size, False, False), keys))
            halves += [torch.cat([images for images, _ in read]), torch.cat([labels for _, labels in read])]
        x, y, test_x, test_y = halves
        return ImageSet(self.name, self.num_classes, x, y, test_x, test_y, self.mean, self.std)

    def _stream(self, pictures: _Pictures, batches: Any) -> Iterator[tuple[Tensor, Tensor]]:
        loader: DataLoader[Any] = DataLoader(
            pictures,
            batch_sampler=batches,
            num_workers=self.workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own, so that reading data moves no other random numbers
        )
        for batch in loader:
            if isinstance(batch, str):
                raise ReplearnError(batch)
            images, labels = batch
            yield images, labels


class _Keys:
    """Batches of keys, made one by one: an epoch of ImageNet has more than a million."""

    def __init__(self, indices: Tensor, seed: int, epoch: int) -> None:
        self.indices, self.seed, self.epoch = indices, seed, epoch

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[list[Key]]:
        for row in self.indices:
            yield [(index, seed_at(self.seed, self.epoch, index, "augment")) for index in row.tolist()]
