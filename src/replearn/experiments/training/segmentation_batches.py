"""Batches for a segmenter: pictures scaled, cut and flipped on the device, with a class at every pixel."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from ...errors import ReplearnError
from .data.base import IGNORED
from .data.scenes import VOID, SegmentationSet
from .picture_batches import PictureBatches
from .picture_store import PictureStore, Sample, shares
from .processes import Processes
from .recipe import Segmentation
from .seeds import seed_at

TEST = 8  # test pictures at once, where all are of one size


class SegmentationBatches(PictureBatches[SegmentationSet]):
    """Where all pictures are held and of one size, a step finds them on the device and can be captured."""

    def __init__(
        self,
        data: SegmentationSet,
        train: PictureStore,
        test: PictureStore,
        processes: Processes,
        batch_size: int,
        *,
        settings: Segmentation,
        flip: bool,
        device: torch.device,
    ) -> None:
        super().__init__(data, train, test, processes, batch_size, flip=flip, device=device)
        check_settings(settings)
        self.settings = settings
        self._stacked, self._even = train.stacked(), test.stacked() is not None
        self.fixed = self._stacked is not None
        self._mean = torch.tensor(data.mean, device=device).view(1, -1, 1, 1)
        self._std = torch.tensor(data.std, device=device).view(1, -1, 1, 1)
        self._draws = torch.zeros(0)
        self._slot = torch.zeros(batch_size // processes.world, 5, device=device)
        self._stream: Iterator[list[Sample]] = iter(())
        self._samples: list[Sample] = []

    def start_epoch(self, seed: int, epoch: int, first_step: int) -> None:
        self._draws = self.draws(seed, epoch)
        if not self.fixed:
            rows = [self._numbers(self.processes.share(row)) for row in self._draws[first_step:]]
            self._stream = self._train.batches(rows, substitute=True)

    def draws(self, seed: int, epoch: int) -> Tensor:
        """An epoch's choices by step: place, scale, how far down and right (0 to 1), flip."""
        generator = torch.Generator().manual_seed(seed_at(seed, epoch, "data"))
        count, steps = len(self._train.numbers), self.steps(self.batch_size)
        low, high = self.settings.scale
        chance = torch.rand(count, 4, generator=generator)
        order = torch.randperm(count, generator=generator).float()
        scale, flip = low + (high - low) * chance[:, 0], (chance[:, 3] < 0.5).float() * self.flip
        rows = torch.stack([order, scale, chance[:, 1], chance[:, 2], flip], dim=1)
        return rows[: steps * self.batch_size].view(steps, self.batch_size, 5)

    def _numbers(self, rows: Tensor) -> list[int]:
        return [self._train.numbers[int(place)] for place in rows[:, 0]]

    def advance(self, step: int) -> None:
        self._slot.copy_(self.processes.share(self._draws[step]))
        if not self.fixed:
            self._samples = next(self._stream)

    def current(self) -> tuple[Tensor, Tensor]:
        return self.cut(self._slot, self._samples)

    def cut(self, rows: Tensor, samples: list[Sample]) -> tuple[Tensor, Tensor]:
        """Pictures and classes as these rows of draws say; `samples` where they are not held as one tensor."""
        if self._stacked is not None:
            images, masks = (tensor[rows[:, 0].long()] for tensor in self._stacked)
            return self.warped(images, masks, rows)
        made = [
            self.warped(image[None], mask[None], row[None])
            for (_, (image, mask)), row in zip(samples, rows, strict=False)
        ]
        images, masks = (torch.cat(column) for column in zip(*made, strict=True))
        return images, masks

    def warped(self, images: Tensor, masks: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Scale, cut and flip in one sampling; outside a picture is the mean colour, which does not count."""
        height, width = images.shape[-2:]
        side = self.settings.crop
        scale, down, right, flip = (column[:, None] for column in rows[:, 1:].unbind(1))
        line = torch.arange(side, device=rows.device)[None] + 0.5
        ys = (line + down * (scale * height - side).clamp(min=0)) / scale
        xs = (torch.where(flip > 0.5, side - line, line) + right * (scale * width - side).clamp(min=0)) / scale
        across = (2 * xs / width - 1)[:, None, :].expand(-1, side, -1)
        grid = torch.stack([across, (2 * ys / height - 1)[:, :, None].expand(-1, -1, side)], dim=-1)
        images = grid_sample(self.normalised(images), grid, mode="bilinear", align_corners=False)
        shifted = masks[:, None].float() + 1  # so that outside, which is 0, is no class
        labels = grid_sample(shifted, grid, mode="nearest", align_corners=False)[:, 0].round().long() - 1
        return images, counted(labels)

    def normalised(self, images: Tensor) -> Tensor:
        return images.float().div(255).sub(self._mean).div(self._std)

    def peek(self) -> Tensor:
        return self._undistorted(self.draws(0, 0)[0])

    def calibration(self, seed: int, samples: int) -> list[Tensor]:
        rows = self.draws(seed, -1).flatten(0, 1)[:samples]
        size = max(1, min(self.batch_size, len(rows) // 5))  # every fifth batch is held out
        return [self._undistorted(part) for part in rows.split(size)]

    def _undistorted(self, rows: Tensor) -> Tensor:
        samples = [] if self.fixed else next(self._train.batches([self._numbers(rows)], substitute=True))
        return self.cut(rows.to(self.device), samples)[0]

    def test(self, processes: Processes) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole test pictures and their classes; one that only fills up has no pixel that counts."""
        numbers = self._test.numbers
        mine = {number for place, number in enumerate(numbers) if place % processes.world == processes.rank}
        rows = shares(len(numbers), processes.rank, processes.world, TEST if self._even else 1)
        for samples in self._test.batches([[numbers[place] for place in row] for row in rows]):
            if not samples:
                continue  # broken, and reported
            images = torch.stack([image for _, (image, _) in samples])
            labels = torch.stack([mask for _, (_, mask) in samples]).long()
            for place, (number, _) in enumerate(samples):
                if number not in mine:
                    labels[place] = VOID
            yield self.normalised(images), counted(labels)

    def examples(self, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """A few test pictures from all over the set: as they are (0 to 1), normalised, and their classes."""
        parts = [part[0][1] for part in self._test.batches(self.chosen(count)) if part]
        return [(image.float() / 255, self.normalised(image[None]), counted(mask.long())) for image, mask in parts]


def counted(labels: Tensor) -> Tensor:
    """Classes as the loss takes them; without `where`, whose plain number a CUDA graph can't take."""
    return labels.masked_fill((labels < 0) | (labels == VOID), IGNORED)


def check_settings(settings: Segmentation) -> None:
    low, high = settings.scale
    if not 0 < low <= high:
        raise ReplearnError(
            f"segmentation.scale={list(settings.scale)}: write the least and the most, as [0.5, 2.0]."
        )
    if settings.crop < 32 or settings.crop % 16:
        raise ReplearnError(f"segmentation.crop={settings.crop}: write a multiple of 16, at least 32.")
