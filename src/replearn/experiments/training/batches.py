"""Where a run's batches come from: a data set on the device, or a stream."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...errors import ReplearnError
from .augmentation import DeviceImages
from .data.base import IGNORED
from .processes import Processes
from .seeds import seed_at

CALIBRATION = 250  # images in a calibration batch: every fifth batch is held out, so there must be several


class Batches(ABC):
    """One run's view of its training data.

    `fixed` says that batches arrive in the same tensors every time, `one_shape` that they are as large every time:
    then it pays to let cuDNN try its algorithms.
    """

    fixed = False
    one_shape = True

    def __init__(self, processes: Processes, batch_size: int) -> None:
        self.processes, self.batch_size = processes, batch_size

    @abstractmethod
    def steps(self, batch_size: int) -> int:
        """Steps in an epoch."""

    def whole_steps(self, count: int, what: str, name: str, batch_size: int) -> int:
        """Full batches among so many samples; ReplearnError where there is none."""
        if count < batch_size:
            raise ReplearnError(
                f"A batch of {batch_size} is larger than {name}, which has {count} training {what}. Write a "
                "smaller batch_size."
            )
        return count // batch_size

    @abstractmethod
    def start_epoch(self, seed: int, epoch: int, first_step: int) -> None:
        """Draw the epoch, which depends on (seed, epoch) alone."""

    @abstractmethod
    def advance(self, step: int) -> None:
        """Go to a step's batch."""

    @abstractmethod
    def current(self) -> Any:
        """The batch of the step; part of what is captured."""

    @abstractmethod
    def peek(self) -> Any:
        """One training batch as the model takes it."""

    @abstractmethod
    def calibration(self, seed: int, samples: int) -> list[Any]:
        """Training samples as the model takes them, in batches, for fitting operators to a trained model."""


class ImageBatches(Batches):
    """Batches of images with a label each, and the loss that mixup changes."""

    num_classes: int
    channels: int
    size: int

    def __init__(self, processes: Processes, batch_size: int, mixup: float = 0.0) -> None:
        super().__init__(processes, batch_size)
        self.mixup = mixup
        self._seed, self._epoch = 0, 0
        self._share = 1.0  # mixup's share of the image itself; the rest is its partner's

    @abstractmethod
    def test(self, processes: Processes) -> Iterator[tuple[Tensor, Tensor]]:
        """Every test image once, over all processes together."""

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """Cross-entropy; under mixup, of both images that were mixed."""
        own = cross_entropy(logits, labels, label_smoothing=smoothing)
        if not self.mixup:
            return own
        other = cross_entropy(logits, labels.flip(0), label_smoothing=smoothing)
        return self._share * own + (1 - self._share) * other

    def mixed(self, images: Tensor, step: int) -> Tensor:
        """Each image mixed with its partner, the batch in reverse order, by one share a batch."""
        if not self.mixup:
            return images
        chance = random.Random(seed_at(self._seed, self._epoch, step, "mixup"))
        self._share = chance.betavariate(self.mixup, self.mixup)
        return self._share * images + (1 - self._share) * images.flip(0)


class DeviceBatches(ImageBatches):
    """Batches of a data set that lives on the device; the draws of an epoch are made up front."""

    def __init__(self, images: DeviceImages, processes: Processes, batch_size: int, device: torch.device) -> None:
        super().__init__(processes, batch_size, images.augment.mixup)
        self.images = images
        self.num_classes, self.channels = images.data.num_classes, images.data.channels
        self.size = images.size
        self.fixed = not self.mixup
        self._draws = torch.zeros(len(images), 4, dtype=torch.int64, device=device)
        self._slot = torch.zeros(batch_size // processes.world, 4, dtype=torch.int64, device=device)
        self._step = 0

    def steps(self, batch_size: int) -> int:
        return self.whole_steps(len(self.images), "images", self.images.data.name, batch_size)

    def start_epoch(self, seed: int, epoch: int, first_step: int) -> None:
        self._seed, self._epoch = seed, epoch
        self._draws.copy_(self.images.draws(seed, epoch))

    def advance(self, step: int) -> None:
        self._step = step
        whole = self._draws[step * self.batch_size : (step + 1) * self.batch_size]
        self._slot.copy_(self.processes.share(whole))

    def current(self) -> tuple[Tensor, Tensor]:
        images, labels = self.images.batch(self._slot)
        return self.mixed(images, self._step), labels

    def peek(self) -> Tensor:
        return self.images.batch(self._draws[: min(256, self.batch_size)])[0]

    def calibration(self, seed: int, samples: int) -> list[Tensor]:
        rows = self.images.draws(seed, -1)[:samples].to(self._draws.device)
        return [self.images.batch(part)[0] for part in rows.split(CALIBRATION)]

    def test(self, processes: Processes) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.images.test_labels)
        share = math.ceil(count / processes.world)  # alike in every process, so that sharded models stay in step
        indices = processes.rank + processes.world * torch.arange(share)
        for part in indices.to(self.images.test_labels.device).split(1000):
            inside = part < count
            part = torch.where(inside, part, 0)
            labels = torch.where(inside, self.images.test_labels[part], IGNORED)
            yield self.images.normalised(self.images.test_images[part]), labels
