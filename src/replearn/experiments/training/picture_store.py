"""Decoded pictures by number: held on the device where they fit, else read ahead by worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ...errors import ReplearnError
from .data.base import default_workers
from .data.scenes import Defects

HELD_AT_MOST = 4 * 2**30  # bytes
TRIES = 20  # pictures tried in place of a broken one

Read = Callable[[int], tuple[Tensor, ...]]  # a picture by number, with a mask where there is one
Sample = tuple[int, tuple[Tensor, ...]]


class PictureStore:
    """The pictures of one part of a data set.

    A broken one is reported to `defects`: held pictures are all looked at before training; a stream meets it when
    its turn comes, and takes the next whole one instead in training (`substitute`), or leaves it out.
    """

    def __init__(
        self, read: Read, count: int, device: torch.device, defects: Defects, workers: int | None = None
    ) -> None:
        self._read, self._device, self._defects = read, device, defects
        self._workers = default_workers() if workers is None else workers
        self._held: dict[int, tuple[Tensor, ...]] = {}
        self.numbers: tuple[int, ...] = tuple(range(count))
        first = next(self._good(self.numbers), None)
        if first is None:
            raise ReplearnError("Not one picture of this data set can be read: " + " ".join(defects.found[:3]))
        if count * sum(tensor.numel() for tensor in first[1]) <= HELD_AT_MOST:
            self._hold()

    @property
    def held(self) -> bool:
        return bool(self._held)

    def _good(self, numbers: Sequence[int]) -> Iterator[Sample]:
        for number in numbers:
            try:
                yield number, self._read(number)
            except ReplearnError as error:
                self._defects.report(str(error))

    def _hold(self) -> None:
        with ThreadPoolExecutor(self._workers or 1) as pool:
            for number, found in zip(self.numbers, pool.map(self._attempt, self.numbers), strict=True):
                if isinstance(found, str):
                    self._defects.report(found)
                else:
                    self._held[number] = tuple(tensor.to(self._device) for tensor in found)
        self.numbers = tuple(self._held)

    def _attempt(self, number: int) -> tuple[Tensor, ...] | str:
        try:
            return self._read(number)
        except ReplearnError as error:
            return str(error)

    def stacked(self) -> tuple[Tensor, ...] | None:
        """All pictures as one tensor (and all masks as another), where they are held and of one size."""
        rows = list(self._held.values())
        if not rows or len({tuple(tensor.shape for tensor in row) for row in rows}) > 1:
            return None
        made = tuple(torch.stack(column) for column in zip(*rows, strict=True))
        self._held = {
            number: tuple(column[place] for column in made) for place, number in enumerate(self._held)
        }  # views: nothing is held twice
        return made

    def batches(self, rows: Sequence[Sequence[int]], *, substitute: bool = False) -> Iterator[list[Sample]]:
        """The pictures of each row of numbers in turn, on the device."""
        if self.held:
            for row in rows:
                yield [(number, self._held[number]) for number in row if number in self._held]
            return
        loader: DataLoader[Any] = DataLoader(
            _Decoding(self._read, len(self.numbers), substitute and self._defects.policy == "skip"),
            batch_sampler=list(rows),  # type: ignore[arg-type]
            num_workers=self._workers,
            collate_fn=list,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # its own, so that reading data moves no other random numbers
        )
        for batch in loader:
            ready = []
            for number, tensors, problems in batch:
                for problem in problems:
                    self._defects.report(problem)
                if tensors is not None:
                    ready.append((number, tuple(tensor.to(self._device, non_blocking=True) for tensor in tensors)))
            yield ready


class _Decoding(Dataset[Any]):
    """What a worker process does. Errors travel as text: a worker's own exception arrives as a wall of it."""

    def __init__(self, read: Read, count: int, substitute: bool) -> None:
        self.read, self.count, self.tries = read, count, TRIES if substitute else 1

    def __getitem__(self, number: int) -> tuple[int, tuple[Tensor, ...] | None, list[str]]:
        problems: list[str] = []
        for step in range(self.tries):
            place = (number + step) % self.count
            try:
                return place, self.read(place), problems
            except ReplearnError as error:
                problems.append(str(error))
        return number, None, problems


def shares(count: int, rank: int, world: int, size: int) -> list[list[int]]:
    """One process's rows of the places 0 to count - 1; as many in every process: sharded models stay in step.

    The last place fills up; it counts in the process whose it is, which is `place % world`.
    """
    share = -(-count // world)
    mine = [min(rank + world * step, count - 1) for step in range(share)]
    return [mine[start : start + size] for start in range(0, share, size)]
