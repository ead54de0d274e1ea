"""Batches of a data set that is read from disk while training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from .batches import ImageBatches
from .data.base import StreamedSet
from .processes import Processes
from .recipe import Augment
from .seeds import seed_at


class StreamBatches(ImageBatches):
    """One process's share of a stream; images cross the bus as uint8 and are normalised on the device."""

    def __init__(
        self, data: StreamedSet, augment: Augment, processes: Processes, batch_size: int, device: torch.device
    ) -> None:
        super().__init__(processes, batch_size, augment.mixup)
        size = data.size if augment.resize is None else augment.resize
        self.data = replace(data, size=size, rand_augment=augment.rand_augment)
        self.num_classes, self.channels, self.size = data.num_classes, data.channels, size
        self.device = device
        self._mean = torch.tensor(data.mean, device=device).view(1, -1, 1, 1)
        self._std = torch.tensor(data.std, device=device).view(1, -1, 1, 1)
        self._stream: Iterator[tuple[Tensor, Tensor]] = iter(())
        self._batch: tuple[Tensor, Tensor] | None = None
        self._step = 0

    def steps(self, batch_size: int) -> int:
        return self.data.steps(batch_size)

    def start_epoch(self, seed: int, epoch: int, first_step: int) -> None:
        self._seed, self._epoch = seed, epoch
        self._stream = self._from(first_step)

    def _from(self, first: int) -> Iterator[tuple[Tensor, Tensor]]:
        share = (self.processes.rank, self.processes.world, self.batch_size)
        return iter(self.data.train_batches(self._epoch, self._seed, *share, first=first))

    def advance(self, step: int) -> None:
        self._step = step
        images, labels = next(self._stream)
        self._batch = self._ready(images), labels.to(self.device, non_blocking=True)

    def current(self) -> tuple[Tensor, Tensor]:
        if self._batch is None:
            raise RuntimeError("advance() comes before current()")
        images, labels = self._batch
        return self.mixed(images, self._step), labels

    def peek(self) -> Tensor:
        return self._ready(next(self._from(0))[0])

    def calibration(self, seed: int, samples: int) -> list[Tensor]:
        share = (self.processes.rank, self.processes.world, self.batch_size)
        batches = self.data.train_batches(0, seed_at(seed, "calibration"), *share)
        count = -(-samples // max(1, self.batch_size // self.processes.world))
        return [self._ready(images) for images, _ in islice(batches, count)]

    def test(self, processes: Processes) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in self.data.test_batches(processes.rank, processes.world, self.batch_size):
            yield self._ready(images), labels.to(self.device, non_blocking=True)

    def _ready(self, images: Tensor) -> Tensor:
        on_device = images.to(self.device, non_blocking=True)
        return on_device.float().div(255).sub(self._mean).div(self._std)
