"""Batches of whole pictures, with boxes for detection or a class for every pixel for segmentation."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from ...errors import ReplearnError
from .batches import Batches
from .data import IGNORED, DetectionSet, SegmentationSet
from .data.folders import default_workers, read_ahead
from .data.scenes import IMAGENET_MEAN, IMAGENET_STD, VOID, Scene
from .image_batches import Scale
from .processes import Processes
from .recipe import Augment, Recipe
from .seeds import seed_at

HELD_AT_MOST = 4 * 2**30  # bytes
TEST = 8  # test pictures at once for a segmenter, where all are of one size
Set = TypeVar("Set", DetectionSet, SegmentationSet)
Sample = tuple[Tensor, ...]  # a decoded picture, with a mask where there is one
Boxes = dict[str, Tensor]  # as torchvision's detectors take them: boxes and labels
Batch = tuple[list[Tensor], list[Boxes]]


class PictureStore:
    """The decoded pictures of one part of a data set, on the device if they fit, else prefetched by workers."""

    def __init__(self, items: Sequence[Any], read: Callable[[Any], Sample], device: torch.device) -> None:
        self.items, self._read, self._device = items, read, device
        self._held: list[Sample] = []
        if len(items) * sum(tensor.numel() for tensor in read(items[0])) <= HELD_AT_MOST:
            with ThreadPoolExecutor(default_workers()) as pool:
                self._held = [self._placed(sample) for sample in pool.map(read, items)]

    def _placed(self, sample: Sample) -> Sample:
        return tuple(tensor.to(self._device, non_blocking=True) for tensor in sample)

    @cached_property
    def stacked(self) -> Sample | None:
        """All pictures as one tensor (and all masks as another), where they are held and of one size."""
        if len({tuple(tensor.shape for tensor in sample) for sample in self._held}) != 1:
            return None
        made = tuple(torch.stack(column) for column in zip(*self._held, strict=True))
        self._held = list(zip(*made, strict=True))  # views: nothing is held twice
        return made

    def batches(self, rows: Sequence[Sequence[int]]) -> Iterator[list[Sample]]:
        """The pictures of each row of numbers in turn, on the device."""
        if self._held:
            yield from ([self._held[number] for number in row] for row in rows)
            return
        for batch in read_ahead(self._numbered, rows, default_workers(), list):
            yield [self._placed(sample) for sample in batch]

    def _numbered(self, number: int) -> Sample:
        return self._read(self.items[number])


class PictureBatches(Batches, Generic[Set]):
    """Pictures of the set for training and for the test, from their stores, flipped or not."""

    def __init__(
        self,
        data: Set,
        stores: tuple[PictureStore, PictureStore],
        processes: Processes,
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        self.data: Set = data
        self.recipe = recipe
        self.flip = recipe.augment.get(data.name, Augment()).flip
        self._train, self._test = stores
        super().__init__(processes, device, recipe.batch_size, data.num_train, "pictures", data.name)

    @abstractmethod
    def draws(self, seed: int, epoch: int) -> Tensor:
        """An epoch's choices, a row a picture; the first one is its number."""

    @abstractmethod
    def cut(self, rows: Tensor, samples: list[Sample]) -> tuple[Any, Any]:
        """The batch of these rows of draws; `samples` is empty if the pictures are one tensor on the device."""

    def drawn(self, seed: int, epoch: int, first_step: int) -> Iterator[Any]:
        parts = list(self.split(self.draws(seed, epoch), first_step))
        return iter(parts) if self.fixed else zip(parts, self._read(parts), strict=True)

    def _read(self, parts: Sequence[Tensor]) -> Iterator[list[Sample]]:
        """The training pictures that rows of draws choose."""
        return self._train.batches([[int(number) for number in rows[:, 0]] for rows in parts])

    def batch(self, held: Any) -> tuple[Any, Any]:
        return self.cut(held, []) if self.fixed else self.cut(*held)

    def calibration(self, seed: int, samples: int) -> list[Any]:
        rows = self.draws(seed, -1)[: min(samples, self.steps * self.batch_size)]
        parts = rows.split(max(1, min(self.batch_size, len(rows) // 5)))  # every fifth batch is held out
        return [
            self.cut(part.to(self.device), read)[0] for part, read in zip(parts, self._read(parts), strict=True)
        ]

    def tested(self, size: int) -> Iterator[tuple[range, list[Sample]]]:
        """Test pictures with their numbers, `size` at a time."""
        rows = list(self.share_of(self.data.num_test, size))
        return zip(rows, self._test.batches(rows), strict=True)


class DetectionBatches(PictureBatches[DetectionSet]):
    """Pictures as float 0..1 on the device, flipped or not; a detector normalises and resizes them itself."""

    @property
    def one_shape(self) -> bool:  # type: ignore[override]
        return len({(scene.height, scene.width) for scene in self.data.train}) == 1

    def draws(self, seed: int, epoch: int) -> Tensor:
        """Number and flip."""
        generator = torch.Generator().manual_seed(seed_at(seed, epoch, "data"))
        count = self.steps * self.batch_size
        order = torch.randperm(self.data.num_train, generator=generator)[:count]
        flips = torch.rand(count, generator=generator) < 0.5
        return torch.stack([order, flips & self.flip], dim=1)

    def cut(self, rows: Tensor, samples: list[Sample]) -> Batch:
        scenes = [self.data.train[number] for number in rows[:, 0].tolist()]
        return self.as_batch(samples, scenes, rows[:, 1].tolist())

    def as_batch(self, samples: list[Sample], scenes: Sequence[Scene], flips: Sequence[int]) -> Batch:
        images, targets = [], []
        for (image,), scene, flip in zip(samples, scenes, flips, strict=True):
            boxes = scene.boxes
            if flip:
                width = image.shape[-1]
                image = image.flip(-1)
                boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], dim=1)
            images.append(image.float().div(255))
            ready = {"boxes": boxes, "labels": scene.labels}
            targets.append({key: value.to(self.device, non_blocking=True) for key, value in ready.items()})
        return images, targets

    def test(self) -> Iterator[tuple[list[Scene], Batch]]:
        """Test pictures with their scenes."""
        for numbers, samples in self.tested(self.share):
            scenes = [self.data.test[number] for number in numbers]
            yield scenes, self.as_batch(samples, scenes, [0] * len(scenes))


class SegmentationBatches(PictureBatches[SegmentationSet]):
    """Scaled, cut and flipped on the device; held pictures of one size can be part of a captured step."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.settings = self.recipe.segmentation
        low, high = self.settings.scale
        if not 0 < low <= high:
            raise ReplearnError(f"segmentation.scale={[low, high]}: write the least and the most, as [0.5, 2.0].")
        if self.settings.crop < 32 or self.settings.crop % 16:
            raise ReplearnError(f"segmentation.crop={self.settings.crop}: write a multiple of 16, at least 32.")
        self._stacked, self._even = self._train.stacked, self._test.stacked is not None
        self.fixed = self._stacked is not None
        self.normalised = Scale(IMAGENET_MEAN, IMAGENET_STD, self.device)

    def draws(self, seed: int, epoch: int) -> Tensor:
        """Number, scale, how far down and right (0 to 1), flip."""
        generator = torch.Generator().manual_seed(seed_at(seed, epoch, "data"))
        count = self.data.num_train
        low, high = self.settings.scale
        chance = torch.rand(count, 4, generator=generator)
        order = torch.randperm(count, generator=generator).float()
        scale, flip = low + (high - low) * chance[:, 0], (chance[:, 3] < 0.5).float() * self.flip
        return torch.stack([order, scale, chance[:, 1], chance[:, 2], flip], dim=1)

    def cut(self, rows: Tensor, samples: list[Sample]) -> tuple[Tensor, Tensor]:
        if self._stacked is not None:
            images, masks = (tensor[rows[:, 0].long()] for tensor in self._stacked)
            return self.warped(images, masks, rows)
        rows = rows.to(self.device)
        made = [
            self.warped(image[None], mask[None], row[None])
            for (image, mask), row in zip(samples, rows, strict=True)
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

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole test pictures and their classes."""
        for _, samples in self.tested(TEST if self._even else 1):
            images, masks = (torch.stack(column) for column in zip(*samples, strict=True))
            yield self.normalised(images), counted(masks.long())


def counted(labels: Tensor) -> Tensor:
    """Classes as the loss takes them; without `where`, whose plain number a CUDA graph can't take."""
    return labels.masked_fill((labels < 0) | (labels == VOID), IGNORED)
