"""A small data set on the device: uint8 images that are cropped, flipped and normalised there in batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from ...errors import ReplearnError
from .data.base import ImageSet
from .recipe import Augment
from .seeds import seed_at


class DeviceImages:
    """The images of a data set on one device, shared by every run that trains on it there."""

    def __init__(self, data: ImageSet, augment: Augment, device: torch.device) -> None:
        if augment.rand_augment:
            raise ReplearnError(
                f"RandAugment works on streamed data sets, and {data.name} is held in memory; "
                "use pad and flip for it."
            )
        self.data = data
        self.augment = augment
        # made smaller once, but larger batch by batch: a small set need not fill the device
        smaller = augment.resize if augment.resize is not None and augment.resize < data.size else None
        train, test = (resized(images, smaller) for images in (data.train_images, data.test_images))
        self._held = int(train.shape[2])
        self.size = augment.resize or self._held
        self._padded = padded(train, augment).to(device)
        self.labels = data.train_labels.to(device)
        self.test_images = test.to(device)
        self.test_labels = data.test_labels.to(device)
        self._mean = torch.tensor(data.mean, device=device).view(1, -1, 1, 1)
        self._std = torch.tensor(data.std, device=device).view(1, -1, 1, 1)

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def draws(self, seed: int, epoch: int) -> Tensor:
        """One epoch's choices, a row an image in training order: image, crop row, crop column, flip."""
        generator = torch.Generator().manual_seed(seed_at(seed, epoch, "data"))
        # so little work, while a GPU waits, is done before other threads have woken up
        with one_thread() if self.labels.is_cuda else nullcontext():
            order = torch.randperm(len(self), generator=generator)
            span = 2 * self.augment.pad + 1
            corner = torch.randint(span, (len(self), 2), generator=generator)
            flip = torch.randint(2, (len(self), 1), generator=generator) * int(self.augment.flip)
            return torch.cat([order[:, None], corner, flip], dim=1)

    def batch(self, draws: Tensor) -> tuple[Tensor, Tensor]:
        """The training images and labels that these rows of `draws` choose, on the device."""
        image, row, column, flip = draws.unbind(1)
        windows = self._padded.unfold(2, self._held, 1).unfold(3, self._held, 1)
        x = windows[image, :, row, column]
        if self.augment.flip:
            x = torch.where(flip.bool().view(-1, 1, 1, 1), x.flip(-1), x)
        return self.normalised(x), self.labels[image]

    def drawn(self, count: int, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """So many training images, drawn once and not augmented, in batches with their labels."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:count]
        draws = torch.zeros(len(order), 4, dtype=torch.int64)
        draws[:, 0] = order
        return [self.batch(part.to(self.labels.device)) for part in draws.split(size)]

    def originals(self) -> Tensor:
        """The training images as they are, neither padded nor flipped."""
        edge = self.augment.pad
        return self._padded[:, :, edge : edge + self._held, edge : edge + self._held]

    def normalised(self, images: Tensor) -> Tensor:
        ready = images.float().div(255).sub(self._mean).div(self._std)
        if self.size > self._held:
            ready = interpolate(ready, size=(self.size, self.size), mode="bilinear", align_corners=False)
        return ready


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch's operations on a CPU run in the thread that calls them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def resized(images: Tensor, side: int | None) -> Tensor:
    """Images brought to a side length by bilinear interpolation, still uint8."""
    if side is None or side == images.shape[2]:
        return images
    parts = [
        interpolate(part.float(), size=(side, side), mode="bilinear", antialias=True).round().clamp(0, 255)
        for part in images.split(4096)
    ]
    return torch.cat([part.to(torch.uint8) for part in parts])


def padded(images: Tensor, augment: Augment) -> Tensor:
    if not augment.pad:
        return images
    border = [augment.pad] * 4
    if augment.pad_mode == "zeros":
        return pad(images, border)
    return torch.cat([pad(part.float(), border, mode="reflect").to(torch.uint8) for part in images.split(4096)])
