"""Pictures in a folder for each class, streamed: a data set too large for memory, as ImageNet."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ....errors import ReplearnError
from ..seeds import seed_at
from .images import IGNORED
from .scenes import open_picture
from .source import Counted

Key = tuple[int, int]  # an image's index, -1 for a filler, and the seed of its augmentation


def transform_for(size: int, train: bool, rand_augment: bool) -> Any:
    """A picture as uint8: a random crop of 8 % to 100 %, flipped or not; in tests its centre (224 of 256)."""
    from torchvision.transforms import v2

    if not train:
        return v2.Compose([v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), v2.PILToTensor()])
    steps = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    return v2.Compose([*steps, *([v2.RandAugment()] if rand_augment else []), v2.PILToTensor()])


class Reader(Dataset[Any]):
    """What a worker process does: one item for one key, or a text that says what is wrong with it.

    A worker's own exception would arrive as a wall of text.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.read(key)
        except ReplearnError as error:
            return str(error)


def default_workers() -> int:
    """As many worker processes as this process may use cores, and not more than eight."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def loader_of(
    read: Callable[[Any], Any], batches: Any, workers: int, collate: Callable[[list[Any]], Any], pin: bool
) -> DataLoader[Any]:
    """Batches of items read ahead by worker processes."""
    return DataLoader(
        Reader(read),
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin,
        generator=torch.Generator(),  # its own, so that reading data moves no other random numbers
    )


def read_labelled(key: Key, samples: Sequence[tuple[str, int]], size: int, transform: Any) -> tuple[Tensor, int]:
    index, seed = key
    if index < 0:
        return torch.zeros(3, size, size, dtype=torch.uint8), IGNORED
    path, label = samples[index]
    image = open_picture(Path(path)).convert("RGB")
    with torch.random.fork_rng(devices=[]):  # the transforms draw from torch's global generator
        torch.manual_seed(seed)
        return transform(image), label


def stacked(samples: list[Any]) -> tuple[Tensor, Tensor] | str:
    if wrong := next((sample for sample in samples if isinstance(sample, str)), None):
        return wrong
    return torch.stack([image for image, _ in samples]), torch.tensor([label for _, label in samples])


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamedSet(Counted):
    """A data set too large for memory: batches of uint8 images (B, C, size, size) and int64 labels.

    `batch_size` is that of all processes together; each gets its equal part. The same (seed, epoch) gives the same
    batches for any number of workers, and of processes together. Other settings:
    `dataclasses.replace(stream, size=160, rand_augment=True)`.
    """

    name: str
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: Any = field(repr=False)  # torchvision's ImageFolder
    test: Any = field(repr=False)
    channels: int = 3
    size: int = 224
    rand_augment: bool = False
    workers: int = field(default_factory=default_workers)  # 0: read in this process

    def train_batches(
        self, epoch: int, seed: int, rank: int = 0, world_size: int = 1, batch_size: int = 256, first: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch's augmented batches from number `first` on; a last one that is not full is left out."""
        steps = self.num_train // batch_size
        generator = torch.Generator().manual_seed(seed_at(seed, epoch, "order"))
        order = torch.randperm(self.num_train, generator=generator)[: steps * batch_size]
        mine = order.reshape(steps, world_size, -1)[first:, rank]
        # made one by one: an epoch of ImageNet has more than a million
        keys = ([(index, seed_at(seed, epoch, index, "augment")) for index in row.tolist()] for row in mine)
        return self._stream(self.train, True, keys)

    def test_batches(
        self, rank: int = 0, world_size: int = 1, batch_size: int = 256
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Every test image once, over all processes together.

        Each process gets the same number of batches, so that sharded models stay in step; images
        that only fill up are labelled IGNORED: count `labels >= 0`.
        """
        batches = []
        for whole in torch.arange(self.num_test).split(batch_size):
            share = -(-len(whole) // world_size)
            indices = whole[rank * share : (rank + 1) * share].tolist()
            batches.append([(index, 0) for index in indices + [-1] * (share - len(indices))])
        return self._stream(self.test, False, batches)

    def picked(self, train: bool, indices: list[int]) -> tuple[Tensor, Tensor]:
        """These training or test images, cropped as in tests, and their labels."""
        parts = [[(index, 0) for index in indices[start : start + 64]] for start in range(0, len(indices), 64)]
        images, labels = zip(*self._stream(self.train if train else self.test, False, parts), strict=True)
        return torch.cat(images), torch.cat(labels)

    def _stream(self, part: Any, augment: bool, batches: Any) -> Iterator[tuple[Tensor, Tensor]]:
        transform = transform_for(self.size, augment, self.rand_augment)
        read = partial(read_labelled, samples=part.samples, size=self.size, transform=transform)
        for batch in loader_of(read, batches, self.workers, stacked, torch.cuda.is_available()):
            if isinstance(batch, str):
                raise ReplearnError(batch)
            yield batch
