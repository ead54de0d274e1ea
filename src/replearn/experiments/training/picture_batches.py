"""Batches of whole pictures: for a detector with boxes, for a segmenter with a class at every pixel."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from ...errors import ReplearnError
from .batches import Batches
from .data import IGNORED, DetectionSet, SegmentationSet
from .data.scenes import VOID, Defects, Scene
from .image_batches import Scale
from .picture_store import PictureStore, Sample
from .processes import Processes
from .recipe import Augment, Recipe
from .seeds import seed_at

TEST = 8  # test pictures at once for a segmenter, where all are of one size
Set = TypeVar("Set", DetectionSet, SegmentationSet)
Boxes = dict[str, Tensor]  # as torchvision's detectors take them: boxes and labels
Batch = tuple[list[Tensor], list[Boxes]]


@dataclass(frozen=True)
class Pictures(Generic[Set]):
    """A data set with the pictures of its two parts, which several runs share."""

    data: Set
    train: PictureStore
    test: PictureStore
    defects: Defects


class PictureBatches(Batches, Generic[Set]):
    """Pictures of a store for training and of another for the test, flipped or not."""

    def __init__(self, held: Pictures[Set], processes: Processes, recipe: Recipe, device: torch.device) -> None:
        data = held.data
        self.data: Set = data
        self.device, self.recipe = device, recipe
        self.flip = recipe.augment.get(data.name, Augment()).flip
        self._train, self._test = held.train, held.test
        self.numbers = self._trained_on()
        super().__init__(processes, recipe.batch_size, len(self.numbers), "pictures", data.name)
        self._stream: Iterator[list[Sample]] = iter(())
        self._samples: list[Sample] = []

    def _trained_on(self) -> tuple[int, ...]:
        return self._train.numbers

    @abstractmethod
    def draws(self, seed: int, epoch: int) -> Tensor:
        """An epoch's choices by step, a row a picture; the first one is its place in `numbers`."""

    @abstractmethod
    def cut(self, rows: Tensor, samples: list[Sample]) -> tuple[Any, Any]:
        """A batch as these rows of draws say; without samples where the pictures are held as one tensor."""

    def start_epoch(self, seed: int, epoch: int, first_step: int) -> None:
        self._draws = self.draws(seed, epoch)
        if not self.fixed:
            rows = [self._numbers(self.processes.share(row)) for row in self._draws[first_step:]]
            self._stream = self._train.batches(rows, substitute=True)

    def _numbers(self, rows: Tensor) -> list[int]:
        return [self.numbers[int(place)] for place in rows[:, 0]]

    def advance(self, step: int) -> None:
        self._rows = self.processes.share(self._draws[step])
        if not self.fixed:
            self._samples = next(self._stream)

    def current(self) -> tuple[Any, Any]:
        return self.cut(self._rows, self._samples)

    def calibration(self, seed: int, samples: int) -> list[Any]:
        rows = self.draws(seed, -1).flatten(0, 1)[:samples]
        parts = rows.split(max(1, min(self.batch_size, len(rows) // 5)))  # every fifth batch is held out
        numbers = [self._numbers(part) for part in parts]
        read = iter(()) if self.fixed else self._train.batches(numbers, substitute=True)
        return [self.cut(part.to(self.device), next(read, []))[0] for part in parts]

    def test_samples(self, processes: Processes, size: int) -> Iterator[list[tuple[bool, Sample]]]:
        """Test pictures, as many in every process so that sharded models stay in step.

        Each counts once over all processes: False stands beside one that only fills up.
        """
        numbers = self._test.numbers
        places = range(processes.rank, processes.world * -(-len(numbers) // processes.world), processes.world)
        filler = numbers[-1] if places[-1] >= len(numbers) else None
        mine = [numbers[min(place, len(numbers) - 1)] for place in places]
        rows = [mine[start : start + size] for start in range(0, len(mine), size)]
        for samples in self._test.batches(rows):
            if samples:  # else all of them were broken, and reported
                yield [(sample[0] != filler, sample) for sample in samples]

    def chosen(self, count: int) -> Iterator[Sample]:
        """A few test pictures, spread over the set."""
        numbers = self._test.numbers
        rows = [[numbers[len(numbers) * place // count]] for place in range(min(count, len(numbers)))]
        return (samples[0] for samples in self._test.batches(rows) if samples)


class DetectionBatches(PictureBatches[DetectionSet]):
    """Pictures as float 0..1 on the device, flipped or not; a detector normalises and resizes them itself."""

    @property
    def one_shape(self) -> bool:  # type: ignore[override]
        shapes = {(scene.height, scene.width) for scene in self.data.train}
        return len(shapes) == len(self.recipe.detection.min_size) == 1

    def _trained_on(self) -> tuple[int, ...]:
        """Pictures without a box are left out where the recipe says so, as torchvision's reference does."""
        keep = self.recipe.detection.keep_empty
        return tuple(number for number in self._train.numbers if keep or len(self.data.train[number].labels))

    def draws(self, seed: int, epoch: int) -> Tensor:
        """Place and flip."""
        generator = torch.Generator().manual_seed(seed_at(seed, epoch, "data"))
        count = self.steps * self.batch_size
        order = torch.randperm(len(self.numbers), generator=generator)[:count]
        flips = torch.rand(count, generator=generator) < 0.5
        return torch.stack([order, flips & self.flip], dim=1).view(self.steps, self.batch_size, 2)

    def cut(self, rows: Tensor, samples: list[Sample]) -> Batch:
        return self.as_batch(samples, self.data.train, rows[:, 1].tolist())

    def as_batch(self, samples: list[Sample], scenes: tuple[Scene, ...], flips: list[int] | None = None) -> Batch:
        images, targets = [], []
        for (number, (image,)), flip in zip(samples, flips or [0] * len(samples), strict=True):
            boxes, labels = scenes[number].boxes, scenes[number].labels
            if flip:
                width = image.shape[-1]
                image = image.flip(-1)
                boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], dim=1)
            images.append(image.float().div(255))
            ready = {"boxes": boxes, "labels": labels}
            targets.append({key: value.to(self.device, non_blocking=True) for key, value in ready.items()})
        return images, targets

    def test(self, processes: Processes) -> Iterator[tuple[list[Scene | None], Batch]]:
        """Test pictures with their scenes; None for one that only fills up."""
        for samples in self.test_samples(processes, self.batch_size // processes.world):
            scenes = [self.data.test[number] if counts else None for counts, (number, _) in samples]
            yield scenes, self.as_batch([sample for _, sample in samples], self.data.test)

    def examples(self, count: int) -> list[tuple[Tensor, Boxes]]:
        """A few test pictures with their boxes."""
        return list(zip(*self.as_batch(list(self.chosen(count)), self.data.test), strict=True))


class SegmentationBatches(PictureBatches[SegmentationSet]):
    """Scaled, cut and flipped on the device; held pictures of one size can be part of a captured step."""

    def __init__(
        self, held: Pictures[SegmentationSet], processes: Processes, recipe: Recipe, device: torch.device
    ) -> None:
        super().__init__(held, processes, recipe, device)
        self.settings = recipe.segmentation
        low, high = self.settings.scale
        if not 0 < low <= high:
            raise ReplearnError(f"segmentation.scale={[low, high]}: write the least and the most, as [0.5, 2.0].")
        if self.settings.crop < 32 or self.settings.crop % 16:
            raise ReplearnError(f"segmentation.crop={self.settings.crop}: write a multiple of 16, at least 32.")
        self._stacked, self._even = self._train.stacked(), self._test.stacked() is not None
        self.fixed = self._stacked is not None
        self.normalised = Scale(self.data.mean, self.data.std, device)
        self._slot = torch.zeros(self.share, 5, device=device)

    def draws(self, seed: int, epoch: int) -> Tensor:
        """Place, scale, how far down and right (0 to 1), flip."""
        generator = torch.Generator().manual_seed(seed_at(seed, epoch, "data"))
        count, steps = len(self.numbers), self.steps
        low, high = self.settings.scale
        chance = torch.rand(count, 4, generator=generator)
        order = torch.randperm(count, generator=generator).float()
        scale, flip = low + (high - low) * chance[:, 0], (chance[:, 3] < 0.5).float() * self.flip
        rows = torch.stack([order, scale, chance[:, 1], chance[:, 2], flip], dim=1)
        return rows[: steps * self.batch_size].view(steps, self.batch_size, 5)

    def advance(self, step: int) -> None:
        super().advance(step)
        self._rows = self._slot.copy_(self._rows)

    def cut(self, rows: Tensor, samples: list[Sample]) -> tuple[Tensor, Tensor]:
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

    def test(self, processes: Processes) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole test pictures and their classes; one that only fills up has no pixel that counts."""
        for samples in self.test_samples(processes, TEST if self._even else 1):
            images = torch.stack([image for _, (_, (image, _)) in samples])
            masks = [mask if counts else torch.full_like(mask, VOID) for counts, (_, (_, mask)) in samples]
            yield self.normalised(images), counted(torch.stack(masks).long())

    def examples(self, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """A few test pictures from all over the set: as they are (0 to 1), normalised, and their classes."""
        parts = [tensors for _, tensors in self.chosen(count)]
        return [(image.float() / 255, self.normalised(image[None]), counted(mask.long())) for image, mask in parts]


def counted(labels: Tensor) -> Tensor:
    """Classes as the loss takes them; without `where`, whose plain number a CUDA graph can't take."""
    return labels.masked_fill((labels < 0) | (labels == VOID), IGNORED)
