"""What stands in a block's place: nothing, or a fitted linear map, as channels, low rank or full."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Correction(nn.Module):
    """g(x) = after(x + map(x)): a linear map on tokens or pixels, with what followed the block's last sum.

    Takes whatever the block took, and returns a tuple where the block did.
    """

    def __init__(
        self, map: nn.Module | None, after: nn.Module | None = None, *, argument: str = "", length: int = 0
    ) -> None:
        super().__init__()
        self.map, self.after = map, after
        self.argument, self.length = argument, length

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x: Tensor = kwargs[self.argument] if self.argument in kwargs else args[0]
        y = x if self.map is None else x + self.map(x)
        if self.after is not None:
            y = self.after(y)
        return (y, *([None] * (self.length - 1))) if self.length else y


def pass_through(argument: str, length: int) -> nn.Module:
    """Nothing, in a form that takes what a block took and returns as many values."""
    return Correction(None, argument=argument, length=length) if argument or length else nn.Identity()


def adopt_attributes_(stand_in: nn.Module, block: nn.Module) -> nn.Module:
    """Give a stand-in the block's plain attributes, such as its number, which the model's code may read."""
    for name, value in vars(block).items():
        plain = value is None or isinstance(value, (bool, int, float, str))
        if plain and not name.startswith("_") and name != "training" and not hasattr(stand_in, name):
            setattr(stand_in, name, value)
    return stand_in


class Channels(nn.Module):
    """A scale and a shift for every channel."""

    def __init__(self, width: int, channel: int, dims: int) -> None:
        super().__init__()
        shape = [width if i == channel else 1 for i in range(1, dims)]
        self.scale = nn.Parameter(torch.zeros(shape))
        self.shift = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class OnLast(nn.Module):
    """A map of the last dimension, for features that stand in another."""

    def __init__(self, map: nn.Module, channel: int) -> None:
        super().__init__()
        self.map, self.channel = map, channel

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.map(x.movedim(self.channel, -1)).movedim(-1, self.channel)
        return made


def image_map(width: int, kernel: int, rank: int | None) -> nn.Sequential:
    """A convolution, or two thin ones, with BatchNorm behind."""
    if rank is None:
        return nn.Sequential(
            nn.Conv2d(width, width, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(width)
        )
    return nn.Sequential(
        nn.Conv2d(width, rank, kernel, padding=kernel // 2, bias=False),
        nn.Conv2d(rank, width, 1, bias=False),
        nn.BatchNorm2d(width),
    )


def token_map(width: int, rank: int | None) -> nn.Module:
    """A linear layer, or two thin ones."""
    if rank is None:
        return nn.Linear(width, width)
    return nn.Sequential(nn.Linear(width, rank, bias=False), nn.Linear(rank, width))
