"""Pictures in a folder for each class, streamed: a data set too large for memory, as ImageNet."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ....errors import ReplearnError
from .scenes import open_picture
from .source import Counted

Key = tuple[int, int]  # an image's index, and the seed of its augmentation


def transform_for(size: int, train: bool) -> Any:
    """The transform to uint8: for training a random crop and flip, for tests a centre crop (224 of 256)."""
    from torchvision.transforms import v2

    if not train:
        return v2.Compose([v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), v2.PILToTensor()])
    return v2.Compose([v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()])


def default_workers() -> int:
    """The number of cores that this process may use, at most eight."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


class Reader(Dataset[Any]):
    """Reads a whole batch in a worker process, or returns an error message as text.

    An exception in a worker would be printed with two tracebacks.
    """

    def __init__(self, read: Callable[[Any], Any], collate: Callable[[list[Any]], Any]) -> None:
        self.read, self.collate = read, collate

    def __getitems__(self, keys: Sequence[Any]) -> Any:
        try:
            return self.collate([self.read(key) for key in keys])
        except ReplearnError as error:
            return str(error)


def read_ahead(
    read: Callable[[Any], Any], batches: Any, workers: int, collate: Callable[[list[Any]], Any]
) -> Iterator[Any]:
    """Batches of items, read by worker processes; ReplearnError for an item that can't be read."""
    loader = DataLoader(
        Reader(read, collate),
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=unchanged,
        pin_memory=torch.cuda.is_available(),
        generator=torch.Generator(),  # so that the global generator does not advance
    )
    for batch in loader:
        if isinstance(batch, str):
            raise ReplearnError(batch)
        yield batch


def unchanged(batch: Any) -> Any:
    return batch


def read_labelled(key: Key, samples: Sequence[tuple[str, int]], transform: Any) -> tuple[Tensor, int]:
    index, seed = key
    path, label = samples[index]
    image = open_picture(Path(path)).convert("RGB")
    with torch.random.fork_rng(devices=[]):  # the transforms draw from torch's global generator
        torch.manual_seed(seed)
        return transform(image), label


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamedSet(Counted):
    """A data set too large for memory, whose pictures are read by worker processes."""

    name: str
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: Any = field(repr=False)  # torchvision's ImageFolder
    test: Any = field(repr=False)
    channels: int = 3
    size: int = 224
    workers: int = field(default_factory=default_workers)  # 0: read in this process

    def read(
        self, train: bool, batches: Iterable[Sequence[Key]], transform: Any
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of uint8 images (B, C, size, size) and int64 labels."""
        samples = (self.train if train else self.test).samples
        read = partial(read_labelled, samples=samples, transform=transform)
        return read_ahead(read, batches, self.workers, default_collate)
