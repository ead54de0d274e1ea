"""Least squares from streamed moments: memory does not grow with the data.

Every fit is of the same form: targets Y (n, R) from features F (n, K) by Y = F W^T + t. What is kept
of the data are the moments F'F, Y'F and the sums, in float64. From them come the best coefficients of
given directions, a full W with ridge, and a W of low rank, each with its error on held-out moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGES = tuple(10.0**exponent for exponent in range(-8, 2))


class Moments:
    """Sums over rows of features and targets, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self._gram: Tensor | None = None  # of rows (features, targets, 1)
        self._split = 0

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Add rows: features (n, K), targets (n, R)."""
        rows = torch.cat([features, targets, features.new_ones(len(features), 1)], dim=1).double()
        gram = rows.mT @ rows
        self._gram = gram if self._gram is None else self._gram + gram
        self._split = features.shape[1]
        self.count += len(features)

    @property
    def gram(self) -> Tensor:
        if self._gram is None:
            raise ValueError("no rows were added")
        return self._gram

    @property
    def features(self) -> Tensor:
        """The mean of the features, (K,)."""
        return self.gram[-1, : self._split] / self.count

    @property
    def targets(self) -> Tensor:
        """The mean of the targets, (R,)."""
        return self.gram[-1, self._split : -1] / self.count

    def covariance(self) -> Tensor:
        """Of the features, (K, K)."""
        return self.second() - self.features.outer(self.features)

    def cross(self) -> Tensor:
        """Of targets and features, (R, K)."""
        return self.mixed() - self.targets.outer(self.features)

    def second(self) -> Tensor:
        """The features' second moments about zero, (K, K)."""
        return self.gram[: self._split, : self._split] / self.count

    def mixed(self) -> Tensor:
        """The mean products of targets and features, (R, K)."""
        return self.gram[self._split : -1, : self._split] / self.count

    def error(self, weight: Tensor, shift: Tensor) -> Tensor:
        """The mean squared error of Y = F W^T + t, summed over the outputs."""
        cross = (weight * self.mixed()).sum()
        total = self.power() + ((weight @ self.second()) * weight).sum() - 2 * cross
        total += (shift * (shift + 2 * (weight @ self.features) - 2 * self.targets)).sum()
        return total

    def power(self) -> Tensor:
        """The mean square of the targets, summed over the outputs: the error of doing nothing."""
        k = self._split
        return self.gram[k:-1, k:-1].diagonal().sum() / self.count

    def shift_for(self, weight: Tensor) -> Tensor:
        """The best t for a given W."""
        return self.targets - weight @ self.features


@dataclass(frozen=True, eq=False)
class Solution:
    """A fitted W, with the ridge that did best on held-out rows; for low rank also its factors."""

    weight: Tensor
    ridge: float
    left: Tensor | None = None
    right: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """One inner linear map that is fitted before the operator's last one.

    `aim` names what it should give: the role of the block's convolution whose pre-activation it imitates,
    or `branch`, the residual branch as a whole.
    """

    aim: str
    features: Callable[[Tensor], Tensor]
    fit: Callable[[Moments, Moments], object]


def fit_rows(moments: Moments, directions: list[Tensor], *, shifted: bool = True) -> list[Tensor]:
    """Per output row c, the coefficients of W_c = sum_i s_ic D_ic that fit best, with a free shift or without."""
    covariance = moments.covariance() if shifted else moments.second()
    cross = moments.cross() if shifted else moments.mixed()
    stacked = torch.stack([direction.double() for direction in directions])  # (I, R, K)
    system = torch.einsum("irk,jrk->rij", stacked @ covariance, stacked)
    right = torch.einsum("irk,rk->ri", stacked, cross)
    found = damped_solve(system, right)
    return list(found.unbind(1))


def fit_scalars(moments: Moments, directions: list[Tensor], shifts: list[Tensor], fixed: Tensor) -> Tensor:
    """Scalars of Y = sum_i s_i (F D_i^T + t_i) + fixed; nothing else is free."""
    mean_f, mean_y = moments.features, moments.targets
    second, mixed = moments.second(), moments.mixed()
    d = torch.stack([direction.double() for direction in directions])
    t = torch.stack([shift.double() for shift in shifts])
    made = d @ second  # (I, R, K)
    dm = d @ mean_f  # (I, R): the mean of F D_i^T
    num = len(directions)
    system = made.reshape(num, -1) @ d.reshape(num, -1).T
    system = system + dm @ t.T + t @ dm.T + t @ t.T
    aim = (d * mixed).sum((1, 2)) + t @ mean_y - (dm + t) @ fixed.double()
    return damped_solve(system[None], aim[None])[0]


def damped_solve(system: Tensor, right: Tensor) -> Tensor:
    """Solve small symmetric systems that may be singular (equal sources, silent channels)."""
    scale = system.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    damped = system + 1e-9 * scale[:, None, None] * eye
    return torch.linalg.lstsq(damped, right[..., None]).solution[..., 0]


def leading(matrix: Tensor, rank: int) -> Tensor:
    """The left singular vectors of the largest singular values; by subspace iteration where that is cheaper."""
    if min(matrix.shape) > max(256, 4 * rank):
        return torch.svd_lowrank(matrix, q=rank + 16, niter=6)[0][:, :rank]
    return torch.linalg.svd(matrix, full_matrices=False).U[:, :rank]


def fit_full(
    moments: Moments, held: Moments, base: Tensor, rank: int | None = None, *, shifted: bool = True
) -> Solution:
    """W = base + D, with D full or of the given rank; the ridge is the best one on held-out moments.

    `shifted=False` fits a map without the free t, as a convolution without bias and norm is.
    """
    covariance = moments.covariance() if shifted else moments.second()
    rest = (moments.cross() if shifted else moments.mixed()) - base.double() @ covariance
    none = torch.zeros_like(moments.targets)
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp_min(0)
    scale = values.mean().clamp_min(torch.finfo(torch.float64).tiny)
    turned = rest @ vectors
    best: Solution | None = None
    least = torch.inf
    for ridge in RIDGES:
        damped = values + ridge * scale
        delta = (turned / damped) @ vectors.mT
        left = right = None
        if rank is not None:
            # reduced-rank regression: keep the directions of the output that the fit explains most
            explained = (turned / damped) * damped.sqrt()
            left = leading(explained, rank)
            right = left.mT @ delta
            delta = left @ right
        weight = base.double() + delta
        error = float(held.error(weight, moments.shift_for(weight) if shifted else none))
        if error < least:
            least, best = error, Solution(weight, ridge, left, right)
    if best is None:
        raise ValueError("the moments hold NaN or infinity")
    return best
