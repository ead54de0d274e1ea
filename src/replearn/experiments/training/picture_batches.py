"""What batches of whole pictures share, whatever is learned from them."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from .batches import Batches
from .data.scenes import DetectionSet, SegmentationSet
from .picture_store import PictureStore
from .processes import Processes

Set = TypeVar("Set", DetectionSet, SegmentationSet)


class PictureBatches(Batches, Generic[Set]):
    """Pictures of a store for training and of another for the test, flipped or not."""

    def __init__(
        self,
        data: Set,
        train: PictureStore,
        test: PictureStore,
        processes: Processes,
        batch_size: int,
        *,
        flip: bool,
        device: torch.device,
    ) -> None:
        super().__init__(processes, batch_size)
        self.data: Set = data
        self.device, self.flip = device, flip
        self._train, self._test = train, test

    def steps(self, batch_size: int) -> int:
        return self.whole_steps(len(self._train.numbers), "pictures", self.data.name, batch_size)

    def chosen(self, count: int) -> list[list[int]]:
        """The numbers of a few test pictures, spread over the set, each as a row of its own."""
        numbers = self._test.numbers
        return [[numbers[len(numbers) * place // count]] for place in range(min(count, len(numbers)))]
