"""Streaming from WebDataset shards: tar files of KEY.jpg and KEY.cls, read from front to back."""

from __future__ import annotations

import random
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ....errors import ReplearnError
from ....planning.serialization import parse
from ..seeds import seed_at
from .base import IGNORED, StreamedSet, share_of
from .folders import Sample, collate
from .pictures import SUFFIXES, picture, test_transform, train_transform

BUFFER = 1000  # samples that are shuffled among each other; shards are shuffled as a whole


@dataclass(frozen=True)
class Shard:
    path: Path
    num_samples: int


def list_shards(folder: Path, pattern: str) -> tuple[Shard, ...]:
    """The shards of a split with their sizes: from sizes.json beside them, else by reading every header."""
    paths = sorted(folder.glob(pattern))
    index = folder / "sizes.json"
    try:
        sizes = parse(index.read_text(), str(index)) if index.is_file() else {}
        return tuple(Shard(path, int(sizes.get(path.name) or _count(path))) for path in paths)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, ReplearnError):
            raise
        raise ReplearnError(
            f'{index} is not of the form {{"shard.tar": samples}} ({error}); delete it.'
        ) from error


def _count(path: Path) -> int:
    try:
        with tarfile.open(path) as tar:
            return sum(member.name.endswith(".cls") for member in tar)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ReplearnError(f"{path} is cut off or no tar file ({error}); write this shard again.") from error


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardStream(StreamedSet):
    """The same (seed, epoch) gives the same batches for the same number of workers and processes.

    Each worker of each process reads shards of its own, so that every tar file is read once and from
    front to back; one whose shards end before the epoch does starts over in them.
    """

    train: tuple[Shard, ...]
    test: tuple[Shard, ...]

    def train_batches(
        self, epoch: int, seed: int, rank: int = 0, world_size: int = 1, batch_size: int = 256, first: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        share = share_of(batch_size, rank, world_size)
        if len(self.train) < world_size:
            raise ReplearnError(
                f"{len(self.train)} training shards can't be dealt to {world_size} processes; make more and "
                "smaller ones, or start fewer processes."
            )
        order = list(self.train)
        random.Random(seed_at(seed, epoch, "shards")).shuffle(order)
        transform = (self.size, self.rand_augment)
        reader = _Reader(order[rank::world_size], share, self.num_classes, (seed, epoch, rank), first, transform)
        return islice(self._stream(reader), max(0, self.steps(batch_size) - first))

    def test_batches(
        self, rank: int = 0, world_size: int = 1, batch_size: int = 256
    ) -> Iterator[tuple[Tensor, Tensor]]:
        share = share_of(batch_size, rank, world_size)
        given = [self._test_count(self.test[each::world_size], share) for each in range(world_size)]
        mine = self.test[rank::world_size]
        reader = _Reader(mine, share, self.num_classes, None, 0, (self.size, False))
        fillers = repeat(self._filler(), max(given) - given[rank])
        return chain(self._stream(reader) if mine else (), fillers)

    def _filler(self) -> tuple[Tensor, Tensor]:
        return torch.zeros(1, self.channels, self.size, self.size, dtype=torch.uint8), torch.tensor([IGNORED])

    def _test_count(self, shards: Sequence[Shard], share: int) -> int:
        """How many batches these shards make, where each worker ends in one that may be short."""
        workers = self._workers(shards)
        parts = [sum(shard.num_samples for shard in shards[worker::workers]) for worker in range(workers)]
        return sum(-(-part // share) for part in parts)

    def _workers(self, shards: Sequence[Shard]) -> int:
        return max(1, min(self.workers, len(shards)))

    def _stream(self, reader: _Reader) -> Iterator[tuple[Tensor, Tensor]]:
        loader: DataLoader[Any] = DataLoader(
            reader,
            batch_size=None,
            num_workers=min(self.workers, self._workers(reader.shards)),
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),
        )
        for batch in loader:
            if isinstance(batch, str):
                raise ReplearnError(batch)
            images, labels = batch
            yield images, labels


class _Reader(IterableDataset[Any]):
    """What a worker process does: batches of its own shards; without end in training, once in testing."""

    def __init__(
        self,
        shards: Sequence[Shard],
        share: int,
        num_classes: int,
        place: tuple[int, int, int] | None,  # (seed, epoch, rank) in training, None in testing
        first: int,
        transform: tuple[int, bool],
    ) -> None:
        self.shards, self.share, self.num_classes = shards, share, num_classes
        self.place, self.first, self.transform = place, first, transform

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor] | str]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        # The loader asks worker 0 first. If batches are left out, the worker whose turn it is takes that role.
        role = (worker + self.first) % workers
        samples = self._samples(role, self.shards[role::workers])
        skipped = len(range(role, self.first, workers)) * self.share
        try:
            raw = islice(samples, skipped, None)
            while part := list(islice(raw, self.share)):
                yield collate([self._decode(sample) for sample in part])
        except (ReplearnError, tarfile.TarError, OSError, EOFError, ValueError) as error:
            yield str(error) if isinstance(error, ReplearnError) else _told(error)

    def _samples(self, role: int, shards: Sequence[Shard]) -> Iterator[tuple[dict[str, Any], int]]:
        wds = _webdataset()
        turn = 0
        while True:
            stages = [wds.SimpleShardList([str(shard.path) for shard in shards]), wds.tarfile_to_samples()]
            if self.place is not None:
                chance = random.Random(seed_at(*self.place, role, turn, "samples"))
                stages.append(wds.shuffle(BUFFER, initial=BUFFER, rng=chance))
            count = 0
            for sample in wds.DataPipeline(*stages):
                count += 1
                yield sample, turn
            if self.place is None:
                return
            if not count:
                raise ReplearnError(f"{shards[0].path} and the shards read with it hold no samples.")
            turn += 1

    def _decode(self, held: tuple[dict[str, Any], int]) -> Sample:
        sample, turn = held
        name = f"{sample['__key__']} in {sample['__url__']}"
        raw = next((sample[suffix] for suffix in SUFFIXES if suffix in sample), None)
        try:
            label = int(sample.get("cls", b""))
        except ValueError:
            label = -1
        if raw is None or not 0 <= label < self.num_classes:
            return f"{name} needs a picture and a .cls file with a label from 0 to {self.num_classes - 1}."
        size, rand_augment = self.transform
        transform = train_transform(size, rand_augment) if self.place else test_transform(size)
        seed = seed_at(*self.place[:2], sample["__key__"], turn) if self.place else 0
        try:
            return picture(raw, name, transform, seed), label
        except ReplearnError as error:
            return str(error)


def _told(error: Exception) -> str:
    """webdataset hangs the shard's name, and more, onto the arguments of what the tar reader raised."""
    names = [arg for arg in error.args if isinstance(arg, str) and arg.endswith(".tar")]
    reason = error.args[0] if error.args else type(error).__name__
    return f"{names[-1] if names else 'A shard'} is broken ({reason}); write it again."


def _webdataset() -> Any:
    try:
        import webdataset
    except ImportError as error:
        raise ReplearnError(
            "Shards are read with the webdataset library, which is not installed: pip install webdataset."
        ) from error
    return webdataset
