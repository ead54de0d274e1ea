"""Batches for a detector: lists of pictures of any size, and the boxes in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .data.scenes import DetectionSet, Scene
from .picture_batches import PictureBatches
from .picture_store import Sample, shares
from .processes import Processes
from .seeds import seed_at

Boxes = dict[str, Tensor]  # as torchvision's detectors take them: boxes and labels
Batch = tuple[list[Tensor], list[Boxes]]


class DetectionBatches(PictureBatches[DetectionSet]):
    """Pictures as float 0..1 on the device, flipped or not; a detector normalises and resizes them itself."""

    _flips: Tensor
    _stream: Iterator[list[Sample]]
    _batch: Batch | None = None

    def start_epoch(self, seed: int, epoch: int, first_step: int) -> None:
        rows, self._flips = self._draw(seed, epoch)
        self._stream = self._train.batches(rows[first_step:], substitute=True)

    def _draw(self, seed: int, epoch: int) -> tuple[list[list[int]], Tensor]:
        """This process's pictures of each step, and whether each is flipped."""
        generator = torch.Generator().manual_seed(seed_at(seed, epoch, "data"))
        steps = self.steps(self.batch_size)
        order = torch.tensor(self._train.numbers)[
            torch.randperm(len(self._train.numbers), generator=generator)[: steps * self.batch_size]
        ]
        flips = torch.rand(steps * self.batch_size, generator=generator) < 0.5
        mine = [self.processes.share(column.view(steps, -1).t()).t() for column in (order, flips)]
        return [[int(number) for number in row] for row in mine[0]], mine[1] & self.flip

    def advance(self, step: int) -> None:
        samples = next(self._stream)
        flips = self._flips[step].tolist()
        self._batch = self.as_batch(samples, self.data.train, flips)

    def as_batch(self, samples: list[Sample], scenes: tuple[Scene, ...], flips: list[bool]) -> Batch:
        images, targets = [], []
        for (number, (image,)), flip in zip(samples, flips, strict=False):
            boxes, labels = scenes[number].boxes, scenes[number].labels
            if flip:
                width = image.shape[-1]
                image = image.flip(-1)
                boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], dim=1)
            images.append(image.float().div(255))
            ready = {"boxes": boxes, "labels": labels}
            targets.append({key: value.to(self.device, non_blocking=True) for key, value in ready.items()})
        return images, targets

    def current(self) -> Batch:
        if self._batch is None:
            raise RuntimeError("advance() comes before current()")
        return self._batch

    def peek(self) -> list[Tensor]:
        rows, _ = self._draw(0, 0)
        samples = next(self._train.batches(rows[:1], substitute=True))
        return self.as_batch(samples, self.data.train, [False] * len(samples))[0]

    def calibration(self, seed: int, samples: int) -> list[list[Tensor]]:
        rows, _ = self._draw(seed, -1)
        flat = [number for row in rows for number in row][:samples]
        size = max(1, min(self.batch_size, len(flat) // 5))  # every fifth batch is held out
        parts = [flat[start : start + size] for start in range(0, len(flat), size)]
        stream = self._train.batches(parts, substitute=True)
        return [self.as_batch(part, self.data.train, [False] * len(part))[0] for part in stream]

    def test(self, processes: Processes) -> Iterator[tuple[list[Scene], Batch]]:
        """Test pictures with their scenes: every one once over all processes, but for those that fill up.

        A scene that only fills up has the number -1.
        """
        numbers = self._test.numbers
        size = max(1, self.batch_size // processes.world)
        mine = {number for place, number in enumerate(numbers) if place % processes.world == processes.rank}
        rows = [
            [numbers[place] for place in row]
            for row in shares(len(numbers), processes.rank, processes.world, size)
        ]
        for samples in self._test.batches(rows):
            batch = self.as_batch(samples, self.data.test, [False] * len(samples))
            scenes = [self.data.test[number] for number, _ in samples]
            yield (
                [
                    scene if number in mine else replace(scene, number=-1)
                    for scene, (number, _) in zip(scenes, samples, strict=True)
                ],
                batch,
            )

    def examples(self, count: int) -> list[tuple[Tensor, Boxes]]:
        """A few test pictures, spread over the set, with their boxes."""
        parts = self._test.batches(self.chosen(count))
        made = [self.as_batch(part, self.data.test, [False]) for part in parts if part]
        return [(images[0], targets[0]) for images, targets in made]
