"""Augmentation of calibration images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ReplearnError
from .batches import Augment


def image_augment(x: Tensor) -> Tensor:
    """Random crops of images padded by an eighth, and horizontal flips; what is no batch of images stays."""
    if x.dim() != 4:
        return x
    height, width = x.shape[-2:]
    edge = max(1, min(height, width) // 8)
    padded = nn.functional.pad(x, (edge,) * 4)
    tops, lefts = (torch.randint(0, 2 * edge + 1, (len(x),), device=x.device) for _ in range(2))
    flip = torch.rand(len(x), device=x.device) < 0.5
    rows = tops[:, None] + torch.arange(height, device=x.device)
    places = torch.arange(width, device=x.device)
    columns = lefts[:, None] + torch.where(flip[:, None], places.flip(0), places)
    number = torch.arange(len(x), device=x.device)[:, None, None]
    return (
        padded.permute(0, 2, 3, 1)[number, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
    )


def read_augment(given: Any) -> Augment | None:
    """The augmentation that the user asked for: a function, or 'images' for crops and flips."""
    if given is None or callable(given):
        change: Augment | None = given
        return change
    if given == "images":
        return image_augment
    raise ReplearnError(f"augment={given!r}: give a function of the images, or 'images' for crops and flips.")
