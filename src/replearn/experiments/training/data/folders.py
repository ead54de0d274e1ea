"""Pictures in a folder for each class, streamed: a data set too large for memory, as ImageNet."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ....errors import ReplearnError
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
        self, train: bool, batches: Iterable[Sequence[Key]], size: int, transform: Any
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of uint8 images (B, C, size, size) and int64 labels; a filler's is IGNORED."""
        samples = (self.train if train else self.test).samples
        read = partial(read_labelled, samples=samples, size=size, transform=transform)
        for batch in loader_of(read, batches, self.workers, stacked, torch.cuda.is_available()):
            if isinstance(batch, str):
                raise ReplearnError(batch)
            yield batch
