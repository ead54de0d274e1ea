"""Least squares from streamed sums: Y = X W' + b, ridge towards given weights; memory does not grow with the data.

Rows are multiplied in their own precision and summed in float64. All tensors have a leading dimension of groups,
1 but for grouped convolutions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


class Moments:
    """Sums over rows of x (groups, n, K) and y (groups, n, R)."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[Tensor] = []

    def add(self, x: Tensor, y: Tensor) -> None:
        made = [x.mT @ x, x.mT @ y, x.sum(1), y.sum(1), y.square().sum(1)]
        if not self._sums:
            self._sums = [tensor.double() for tensor in made]
        else:
            for total, tensor in zip(self._sums, made, strict=True):
                total += tensor
        self.count += x.shape[1]

    def finite(self) -> bool:
        return bool(self._sums) and all(bool(tensor.isfinite().all()) for tensor in self._sums)

    @property
    def mean_x(self) -> Tensor:
        return self._sums[2] / self.count

    @property
    def mean_y(self) -> Tensor:
        return self._sums[3] / self.count

    @property
    def second(self) -> Tensor:
        """Mean products of x with itself, (G, K, K)."""
        return self._sums[0] / self.count

    @property
    def mixed(self) -> Tensor:
        """Mean products of x and y, (G, K, R)."""
        return self._sums[1] / self.count

    @property
    def power(self) -> Tensor:
        """The mean square of y, (G, R)."""
        return self._sums[4] / self.count

    def covariance(self) -> Tensor:
        return self.second - self.mean_x[:, :, None] * self.mean_x[:, None, :]

    def cross(self) -> Tensor:
        return self.mixed - self.mean_x[:, :, None] * self.mean_y[:, None, :]

    def shift(self, weight: Tensor) -> Tensor:
        """The best b for a given W (G, R, K)."""
        return self.mean_y - (weight @ self.mean_x[:, :, None])[..., 0]

    def error(self, weight: Tensor, shift: Tensor) -> float:
        """The mean squared error of X W' + b, summed over the outputs."""
        made = weight @ self.second
        total = self.power.sum() + (made * weight).sum() - 2 * (weight * self.mixed.mT).sum()
        mean = (weight @ self.mean_x[:, :, None])[..., 0]
        total += shift.square().sum() + 2 * (shift * (mean - self.mean_y)).sum()
        return float(total)


@dataclass(frozen=True, eq=False)
class Solution:
    """Weights (G, R, K) and shift (G, R), the ridge that did best on held-out rows, and the error there."""

    weight: Tensor
    shift: Tensor
    ridge: float
    error: float
    factors: tuple[Tensor, Tensor] | None = None


def solve(
    fitted: Moments,
    held: Moments,
    base: Tensor,
    *,
    shifted: bool = True,
    rank: int | None = None,
    ridges: tuple[float, ...] = RIDGES,
) -> Solution:
    """The weights closest to the rows, by the ridge towards `base` that is best on held-out rows.

    Held-out rows are never fitted on, so that they can judge later fits, healing and the whole.
    `shifted=False` fits no b; `rank` bounds the rank of what is added to `base`.
    """
    best: Solution | None = None
    for ridge in ridges:
        weight, shift, factors = _solved(fitted, base, ridge, shifted, rank)
        error = held.error(weight, shift)
        if best is None or error < best.error:
            best = Solution(weight, shift, ridge, error, factors)
    if best is None:
        raise ValueError("no ridge was given")
    return best


def _solved(
    moments: Moments, base: Tensor, ridge: float, shifted: bool, rank: int | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    covariance = moments.covariance() if shifted else moments.second
    cross = moments.cross() if shifted else moments.mixed
    damped = covariance.clone()
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
    damped.diagonal(dim1=-2, dim2=-1).add_(ridge * mean[:, None])
    factor = torch.linalg.cholesky_ex(damped)[0]
    rest = cross - covariance @ base.mT
    delta = torch.cholesky_solve(rest, factor).mT
    factors = None
    if rank is not None and rank < min(delta.shape[-2:]):
        # reduced-rank regression: keep the directions of the output that the fit explains most
        left = torch.linalg.svd(delta @ factor, full_matrices=False).U[..., :rank]
        factors = (left, left.mT @ delta)
        delta = factors[0] @ factors[1]
    weight = base + delta
    shift = moments.shift(weight) if shifted else torch.zeros_like(moments.mean_y)
    return weight, shift, factors
