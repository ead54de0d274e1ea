"""Batches of images with a label each: of a small data set on the device, or of a stream.

A small set lives on the device as uint8 and is cropped, flipped and normalised there in batch.
"""

import random
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate, pad

from .batches import Batches
from .data import ImageSet, StreamedSet
from .data.folders import Key, transform_for
from .processes import Processes
from .recipe import Augment
from .seeds import seed_at

CALIBRATION = 250  # images in a calibration batch: every fifth batch is held out, so there must be several


class DeviceImages:
    """The images of a data set on one device, shared by every run that trains on it there."""

    def __init__(self, data: ImageSet, augment: Augment, device: torch.device) -> None:
        self.data, self.augment = data, augment
        self.size = augment.resize or data.size
        self._padded = padded(data.train_images, augment).to(device)
        self.labels = data.train_labels.to(device)
        self.test_images = data.test_images.to(device)
        self.test_labels = data.test_labels.to(device)
        self._scale = Scale(data.mean, data.std, device)

    def __len__(self) -> int:
        return len(self.labels)

    def draws(self, seed: int, epoch: int) -> Tensor:
        """One epoch's choices, a row an image in training order: image, crop row, crop column, flip."""
        generator = torch.Generator().manual_seed(seed_at(seed, epoch, "data"))
        order = torch.randperm(len(self), generator=generator)
        corner = torch.randint(2 * self.augment.pad + 1, (len(self), 2), generator=generator)
        flip = torch.randint(2, (len(self), 1), generator=generator) * int(self.augment.flip)
        return torch.cat([order[:, None], corner, flip], dim=1)

    def batch(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The training images and labels that these rows of `draws` choose, on the device."""
        image, row, column, flip = draws.unbind(1)
        windows = self._padded.unfold(2, self.data.size, 1).unfold(3, self.data.size, 1)
        x = windows[image, :, row, column]
        if self.augment.flip:
            x = torch.where(flip.bool().view(-1, 1, 1, 1), x.flip(-1), x)
        return self.normalised(x), self.labels[image]

    def normalised(self, images: Tensor) -> Tensor:
        """As the model takes them; a change of size, too, is made batch by batch."""
        ready = self._scale(images)
        if self.size == self.data.size:
            return ready
        side = (self.size, self.size)
        return interpolate(ready, side, mode="bilinear", antialias=self.size < self.data.size)


class Scale:
    """uint8 images as float, normalised by channel."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> None:
        self.mean, self.std = (torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (mean, std))

    def __call__(self, images: Tensor) -> Tensor:
        return images.float().div(255).sub(self.mean).div(self.std)


def padded(images: Tensor, augment: Augment) -> Tensor:
    if not augment.pad:
        return images
    border = [augment.pad] * 4
    if augment.pad_mode == "zeros":
        return pad(images, border)
    return torch.cat([pad(part.float(), border, mode="reflect").to(torch.uint8) for part in images.split(4096)])


class ImageBatches(Batches):
    """Batches of images, and the loss that mixup changes."""

    def __init__(
        self,
        data: ImageSet | StreamedSet,
        augment: Augment,
        processes: Processes,
        batch_size: int,
        device: torch.device,
    ) -> None:
        super().__init__(processes, device, batch_size, data.num_train, "images", data.name)
        size = augment.resize or data.size
        self.shape, self.size = (data.num_classes, data.channels, size), size
        self.mixup = augment.mixup
        self._share = 1.0  # mixup's share of the image itself; the rest is its partner's

    @abstractmethod
    def labels_of(self, train: bool) -> Tensor:
        """The labels of the training or the test images."""

    @abstractmethod
    def picked(self, train: bool, indices: Tensor) -> tuple[Tensor, Tensor]:
        """These training or test images, not augmented, as the model takes them, and their labels."""

    def loss(self, logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """Cross-entropy; under mixup, of both images that were mixed."""
        own = cross_entropy(logits, labels, label_smoothing=smoothing)
        if not self.mixup:
            return own
        other = cross_entropy(logits, labels.flip(0), label_smoothing=smoothing)
        return self._share * own + (1 - self._share) * other

    def mixed(self, images: Tensor) -> Tensor:
        """Each image mixed with its partner, the batch in reverse order, by one share a batch."""
        if not self.mixup:
            return images
        chance = random.Random(seed_at(*self.place, "mixup"))
        self._share = chance.betavariate(self.mixup, self.mixup)
        return self._share * images + (1 - self._share) * images.flip(0)


class DeviceBatches(ImageBatches):
    """Batches of a data set that lives on the device; the draws of an epoch are made up front."""

    def __init__(self, images: DeviceImages, processes: Processes, batch_size: int) -> None:
        super().__init__(images.data, images.augment, processes, batch_size, images.labels.device)
        self.images = images
        self.fixed = not self.mixup

    def drawn(self, seed: int, epoch: int, first_step: int) -> Iterator[Tensor]:
        return self.split(self.images.draws(seed, epoch).to(self.device), first_step)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = self.images.batch(rows)
        return self.mixed(images), labels

    def calibration(self, seed: int, samples: int) -> list[Tensor]:
        rows = self.images.draws(seed, -1)[:samples].to(self.device)
        return [self.images.batch(part)[0] for part in rows.split(CALIBRATION)]

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        for part in self.share_of(len(self.images.test_labels), 1000):
            yield self.picked(False, torch.tensor(part))

    def labels_of(self, train: bool) -> Tensor:
        return self.images.labels if train else self.images.test_labels

    def picked(self, train: bool, indices: Tensor) -> tuple[Tensor, Tensor]:
        images = self.images.data.train_images if train else self.images.test_images
        picked = images[indices.to(images.device)].to(self.device)
        return self.images.normalised(picked), self.labels_of(train)[indices.to(self.device)]


class StreamBatches(ImageBatches):
    """One process's share of a stream; images cross the bus as uint8 and are normalised on the device.

    The same (seed, epoch) gives the same batches for any number of workers, and of processes together.
    """

    def __init__(
        self, data: StreamedSet, augment: Augment, processes: Processes, batch_size: int, device: torch.device
    ) -> None:
        super().__init__(data, augment, processes, batch_size, device)
        self.data = data
        self._scale = Scale(data.mean, data.std, device)

    def drawn(self, seed: int, epoch: int, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch's augmented batches from a step on; a last one that is not full is left out."""
        generator = torch.Generator().manual_seed(seed_at(seed, epoch, "order"))
        order = torch.randperm(self.data.num_train, generator=generator)[: self.steps * self.batch_size]
        mine = order.view(self.steps, self.processes.world, -1)[first_step:, self.processes.rank]
        # made one by one: an epoch of ImageNet has more than a million
        keys = ([(index, seed_at(seed, epoch, index, "augment")) for index in row.tolist()] for row in mine)
        return self._read(True, keys, augment=True)

    def _read(
        self, train: bool, batches: Iterable[Sequence[Key]], augment: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        transform = transform_for(self.size, augment)
        for images, labels in self.data.read(train, batches, transform):
            yield (
                self._scale(images.to(self.device, non_blocking=True)),
                labels.to(self.device, non_blocking=True),
            )

    def batch(self, held: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = held
        return self.mixed(images), labels

    def calibration(self, seed: int, samples: int) -> list[Tensor]:
        batches = self.drawn(seed_at(seed, "calibration"), 0, 0)
        return [images for images, _ in islice(batches, -(-samples // self.share))]

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self._whole(False, self.share_of(self.data.num_test, self.share))

    def labels_of(self, train: bool) -> Tensor:
        return torch.tensor((self.data.train if train else self.data.test).targets)

    def picked(self, train: bool, indices: Tensor) -> tuple[Tensor, Tensor]:
        images, labels = zip(*self._whole(train, (part.tolist() for part in indices.split(64))), strict=True)
        return torch.cat(images), torch.cat(labels)

    def _whole(self, train: bool, parts: Iterable[Iterable[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """These pictures, not augmented."""
        return self._read(train, ([(index, 0) for index in part] for part in parts))
