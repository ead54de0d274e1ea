"""Corrections: a learned D that is added to a synthesized weight, and starts at zero."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...errors import ReplearnError
from .options import Options, ReadingOptions
from .synthesis import full_precision, per_row, wide

if TYPE_CHECKING:
    from .site import Site


class Correction(nn.Module):
    """D, a learned tensor added to a weight: of its shape, or of a rank, as left @ right of the flat one."""

    delta: nn.Parameter
    left: nn.Parameter
    right: nn.Parameter

    def __init__(self, shape: tuple[int, ...], rank: int | None, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank, self._shape = rank, shape
        sizes = {"delta": shape}
        if rank is not None:
            sizes = {"left": (shape[0], rank), "right": (rank, math.prod(shape[1:]))}
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, device=device, dtype=dtype)))

    def weight(self) -> Tensor:
        """D, in the dtype that it is stored in."""
        if self.rank is None:
            return self.delta
        with full_precision(self.left.device):
            return (wide(self.left) @ wide(self.right)).view(self._shape)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set D to zero, ready to be trained."""
        nn.init.zeros_(next(self.parameters()))
        if self.rank is not None:
            nn.init.normal_(self.right, std=self.right.shape[1] ** -0.5)

    @torch.no_grad()
    def scale(self, factor: float | Tensor) -> None:
        """Multiply D by a number, or its rows by one each."""
        first = next(self.parameters())
        first.mul_(per_row(factor, first) if isinstance(factor, Tensor) else factor)

    @torch.no_grad()
    def set(self, delta: Tensor, factors: tuple[Tensor, Tensor] | None = None) -> None:
        """Take a fitted D, and its factors if it is of low rank."""
        if self.rank is None:
            self.delta.copy_(delta.view(self.delta.shape))
        elif factors is None:
            raise ReplearnError("A low-rank correction needs a low-rank fit.")
        else:
            self.left.copy_(factors[0][0])
            self.right.copy_(factors[1][0])


def correction_of(options: Options, shape: tuple[int, ...], site: Site, where: str) -> Correction | None:
    """The correction that the options ask for, or None; vectors and scalars are always corrected in full."""
    if not isinstance(options, ReadingOptions) or options.correction == "none":
        return None
    if options.correction == "full" or len(shape) < 2:
        return Correction(shape, None, site.device, site.dtype)
    largest = min(shape[0], math.prod(shape[1:]))
    if options.rank > largest:
        raise ReplearnError(
            f"{where}: a correction of rank {options.rank} does not fit a weight of shape {tuple(shape)}; "
            f"its rank is at most {largest}. Write rank={largest} or less, or correction='full'."
        )
    return Correction(shape, options.rank, site.device, site.dtype)
