"""One picture of a streamed data set: decoded, then cropped for training or for testing."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ....errors import ReplearnError

SUFFIXES = ("jpeg", "jpg", "png", "webp")


@cache
def train_transform(size: int, rand_augment: bool) -> Any:
    """A random crop of 8 % to 100 % of the picture, flipped or not; as uint8."""
    v2 = _transforms()
    steps = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    return v2.Compose([*steps, *([v2.RandAugment()] if rand_augment else []), v2.PILToTensor()])


@cache
def test_transform(size: int) -> Any:
    """The shorter side to 256 for a size of 224, and the centre; as uint8."""
    v2 = _transforms()
    return v2.Compose([v2.Resize(round(size * 256 / 224)), v2.CenterCrop(size), v2.PILToTensor()])


def picture(raw: bytes, name: str, transform: Any, seed: int = 0) -> Tensor:
    """Decode and transform one picture; what is random in it depends on the seed alone."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(raw)).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ReplearnError(
            f"{name} is no picture that can be read ({error}); put the right file there, or delete it and load "
            "with strict_counts=False."
        ) from error
    with torch.random.fork_rng(devices=[]):  # the transforms draw from torch's global generator
        torch.manual_seed(seed)
        made: Tensor = transform(image)
    return made


def _transforms() -> Any:
    try:
        from torchvision.transforms import v2
    except ImportError as error:
        raise ReplearnError(
            "ImageNet is streamed through torchvision, which is not installed: pip install 'replearn[vision]'."
        ) from error
    return v2
