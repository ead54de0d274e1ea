"""Corrections: a learned D that is added to a synthesized weight, and starts at zero."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...errors import ReplearnError
from .options import Options, ReadingOptions
from .synthesis import full_precision, wide

if TYPE_CHECKING:
    from .site import Site


class Correction(nn.Module, ABC):
    """A learned tensor that is added to a weight."""

    @abstractmethod
    def weight(self) -> Tensor:
        """D, in the dtype that it is stored in."""

    @abstractmethod
    def reset_parameters(self) -> None:
        """Set D to zero, ready to be trained."""

    @abstractmethod
    def set(self, delta: Tensor, factors: tuple[Tensor, Tensor] | None = None) -> None:
        """Take a fitted D, and its factors if it is of low rank."""


class FullCorrection(Correction):
    """D as a tensor of the weight's own shape."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.delta)

    def weight(self) -> Tensor:
        return self.delta

    @torch.no_grad()
    def set(self, delta: Tensor, factors: tuple[Tensor, Tensor] | None = None) -> None:
        self.delta.copy_(delta.view(self.delta.shape))


class LowRankCorrection(Correction):
    """D = left @ right, of the given rank, over the weight flattened to (out, everything else)."""

    def __init__(self, shape: tuple[int, ...], rank: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._shape = shape
        columns = math.prod(shape[1:])
        self.left = nn.Parameter(torch.zeros(shape[0], rank, device=device, dtype=dtype))
        self.right = nn.Parameter(torch.zeros(rank, columns, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.left)
        nn.init.normal_(self.right, std=self.right.shape[1] ** -0.5)

    @torch.no_grad()
    def set(self, delta: Tensor, factors: tuple[Tensor, Tensor] | None = None) -> None:
        if factors is None:
            raise ReplearnError("A low-rank correction needs a low-rank fit.")
        self.left.copy_(factors[0][0])
        self.right.copy_(factors[1][0])

    def weight(self) -> Tensor:
        with full_precision(self.left.device):
            return (wide(self.left) @ wide(self.right)).view(self._shape)


def correction_of(options: Options, shape: tuple[int, ...], site: Site, where: str) -> Correction | None:
    """The correction that the options ask for, or None; vectors and scalars are always corrected in full."""
    if not isinstance(options, ReadingOptions) or options.correction == "none":
        return None
    if options.correction == "full" or len(shape) < 2:
        return FullCorrection(shape, site.device, site.dtype)
    largest = min(shape[0], math.prod(shape[1:]))
    if options.rank > largest:
        raise ReplearnError(
            f"{where}: a correction of rank {options.rank} does not fit a weight of shape {tuple(shape)}; "
            f"its rank is at most {largest}. Write rank={largest} or less, or correction='full'."
        )
    return LowRankCorrection(shape, options.rank, site.device, site.dtype)
