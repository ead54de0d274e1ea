"""Decoded pictures by number: held on the device where they fit, else read ahead by worker processes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ...errors import ReplearnError
from .data.folders import Reader, default_workers, loader_of
from .data.scenes import Defects

HELD_AT_MOST = 4 * 2**30  # bytes

Tensors = tuple[Tensor, ...]  # a picture, with a mask where there is one
Sample = tuple[int, Tensors]


class PictureStore:
    """The pictures of one part of a data set; `read` decodes one of its items.

    A broken one is reported to `defects`: held pictures are all looked at before training; a stream meets it when
    its turn comes, and takes the first whole one instead in training (`substitute`), or leaves it out.
    """

    def __init__(
        self, items: Sequence[Any], read: Callable[[Any], Tensors], device: torch.device, defects: Defects
    ) -> None:
        self.items, self._read, self._device, self._defects = items, read, device, defects
        self.numbers: tuple[int, ...] = tuple(range(len(items)))
        self._held: dict[int, Tensors] = {}
        sample = Reader(self._numbered).__getitem__
        self._first = next(self._good(map(sample, self.numbers)), None)
        if self._first is None:
            raise ReplearnError("Not one picture of this data set can be read: " + " ".join(defects.found[:3]))
        if len(items) * sum(tensor.numel() for tensor in self._first[1]) <= HELD_AT_MOST:
            with ThreadPoolExecutor(default_workers()) as pool:
                self._held = dict(self._good(pool.map(sample, self.numbers)))
            self.numbers = tuple(self._held)

    def _numbered(self, number: int) -> Sample:
        return number, self._read(self.items[number])

    def _good(self, samples: Iterable[Sample | str]) -> Iterator[Sample]:
        """The whole ones, on the device."""
        for sample in samples:
            if isinstance(sample, str):
                self._defects.report(sample)
            else:
                yield sample[0], tuple(tensor.to(self._device, non_blocking=True) for tensor in sample[1])

    def stacked(self) -> Tensors | None:
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
        if self._held:
            for row in rows:
                yield [(number, self._held[number]) for number in row if number in self._held]
            return
        assert self._first is not None
        for batch in loader_of(self._numbered, list(rows), default_workers(), list, self._device.type == "cuda"):
            ready = list(self._good(batch))
            yield ready + [self._first] * (len(batch) - len(ready)) if substitute else ready
