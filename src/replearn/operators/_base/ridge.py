"""Ridge regression towards given weights, from moments or, with few rows, from the rows themselves.

    Y = X W' + b

Moments take no memory for rows; a K x K system is solved. With fewer rows than columns the rows are stored, and an
equivalent system with one equation a row is solved. Products are computed in the rows' precision, centred on the
mean of the first batch, and summed in float64: without centring, rounding hides columns of little variance. All
tensors have a leading dimension of groups, which is 1 except for grouped convolutions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...blocks.running import PrivateRandom

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
NARROW = 512  # columns up to which rows are never stored
TINY = torch.finfo(torch.float64).tiny


class Moments:
    """First and second moments of rows x (groups, n, K) and y (groups, n, R)."""

    def __init__(self, *, narrow: float = NARROW) -> None:
        self.count = 0
        self.thinned = False  # True if only a sample of the rows was added
        self._narrow = narrow
        self._sums: list[Tensor] = []  # of rows minus `_about`
        self._about: list[Tensor] = []
        self._rows: list[tuple[Tensor, Tensor]] = []

    def add(self, x: Tensor, y: Tensor) -> None:
        self.count += x.shape[1]
        self._rows.append((x, y))
        if self._sums or x.shape[2] <= self._narrow or self.count > x.shape[2]:
            self._fold()

    def _fold(self) -> None:
        for x, y in self._rows:
            if not self._sums:
                self._about = [rows.mean(1, keepdim=True) for rows in (x, y)]
            x, y = x - self._about[0], y - self._about[1]
            sums = [x.mT @ x, x.mT @ y, x.sum(1), y.sum(1), y.square().sum(1)]
            if not self._sums:
                self._sums = [tensor.double() for tensor in sums]
            else:
                for total, tensor in zip(self._sums, sums, strict=True):
                    total += tensor
        self._rows = []

    @property
    def rows(self) -> tuple[Tensor, Tensor] | None:
        """The rows themselves, if they are stored."""
        if not self._rows:
            return None
        if len(self._rows) > 1:
            xs, ys = zip(*self._rows, strict=True)
            self._rows = [(torch.cat(xs, 1), torch.cat(ys, 1))]
        return self._rows[0]

    def finite(self) -> bool:
        tensors = [*self._sums, *(tensor for pair in self._rows for tensor in pair)]
        return bool(tensors) and all(bool(tensor.isfinite().all()) for tensor in tensors)

    @property
    def mean_x(self) -> Tensor:
        return self.rows[0].double().mean(1) if self.rows else self._sums[2] / self.count + self._about[0][:, 0]

    @property
    def mean_y(self) -> Tensor:
        return self.rows[1].double().mean(1) if self.rows else self._sums[3] / self.count + self._about[1][:, 0]

    @property
    def power(self) -> Tensor:
        """The mean square of y, (G, R)."""
        if self.rows:
            return self.rows[1].double().square().mean(1)
        about = self._about[1][:, 0].double()
        return self._sums[4] / self.count + about * (self._sums[3] / self.count + self.mean_y)

    @property
    def second(self) -> Tensor:
        """E[x x'], (G, K, K)."""
        return self._products(0, self.mean_x)

    @property
    def mixed(self) -> Tensor:
        """E[x y'], (G, K, R)."""
        return self._products(1, self.mean_y)

    def _products(self, place: int, mean: Tensor) -> Tensor:
        one, two = self._about[0].double(), self._about[place].double()
        products = (self._sums[place] / self.count).baddbmm_(one.mT, mean[:, None])
        return products.baddbmm_((self._sums[2] / self.count)[:, :, None], two)

    def covariances(self) -> tuple[Tensor, Tensor]:
        """Covariances of x with itself and with y."""
        means = self.mean_x[:, :, None]
        return self.second - means * self.mean_x[:, None, :], self.mixed - means * self.mean_y[:, None, :]

    def shift(self, weight: Tensor) -> Tensor:
        """The best b for a given W (G, R, K)."""
        return self.mean_y - (weight @ self.mean_x[:, :, None])[..., 0]

    def output_statistics(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of X W', each (G, R)."""
        if self.rows:
            outputs = (self.rows[0] @ weight.mT.to(self.rows[0])).double()
            return outputs.mean(1), outputs.var(1, correction=0)
        mean = (weight @ self.mean_x[:, :, None])[..., 0]
        return mean, ((weight @ self.covariances()[0]) * weight).sum(-1).clamp_min(0)

    def error(self, weight: Tensor, shift: Tensor) -> float:
        """The mean squared error of X W' + b, summed over the outputs."""
        if self.rows:
            x, y = self.rows
            residual = x @ weight.mT.to(x) + shift[:, None].to(x) - y
            return float(residual.double().square().sum() / self.count)
        xy, mean_x, mean_y, yy = (total / self.count for total in self._sums[1:])
        wxx = (weight @ self._sums[0]) / self.count  # _sums[0] is large for wide layers, and not copied
        about_x, about_y = (about.double() for about in self._about)
        shift = shift + (weight @ about_x.mT)[..., 0] - about_y[:, 0]
        total = yy.sum() + (wxx * weight).sum() - 2 * (weight * xy.mT).sum() + shift.square().sum()
        return float(total + 2 * (shift * ((weight @ mean_x[:, :, None])[..., 0] - mean_y)).sum())


@dataclass(frozen=True, eq=False)
class Solution:
    """Weights (G, R, K) and shift (G, R), the ridge with the least error on held-out rows, and that error."""

    weight: Tensor
    shift: Tensor
    ridge: float
    error: float
    factors: tuple[Tensor, Tensor] | None = None


def solve(
    fitted: Moments,
    held_out: Moments,
    base: Tensor,
    *,
    shifted: bool = True,
    rank: int | None = None,
    ridges: tuple[float, ...] = RIDGES,
) -> Solution:
    """The least-squares weights, with the ridge towards `base` that has the least error on held-out rows.

    Held-out rows only choose the ridge. `shifted=False` fits no b; `rank` bounds the rank of the weights minus
    `base`.
    """
    system: FromSums | FromRows = (FromRows if fitted.rows else FromSums)(fitted, base, shifted)

    def solved(ridge: float) -> Solution:
        delta, factors = system.solve(ridge), None
        if rank is not None:
            # reduced-rank regression: project on the output directions with the largest explained variance
            left = leading(system.explained(delta), rank)
            factors = (left, left.mT @ delta)
            delta = factors[0] @ factors[1]
        weight = base + delta
        shift = fitted.shift(weight) if shifted else torch.zeros_like(fitted.mean_y)
        return Solution(weight, shift, ridge, held_out.error(weight, shift), factors)

    return min(map(solved, ridges), key=lambda solution: solution.error)


class FromSums:
    """The system of K equations."""

    def __init__(self, moments: Moments, base: Tensor, shifted: bool) -> None:
        # the covariance is computed anew for each ridge: that of a wide layer is large
        self.moments, self.mean = moments, moments.mean_x[:, :, None]
        self.rest = moments.mixed - (moments.second @ base.mT)
        diagonal = moments.second.diagonal(dim1=-2, dim2=-1)
        if not shifted:
            self.mean = torch.zeros_like(self.mean)
        else:
            self.rest -= self.mean * (moments.mean_y - (base @ self.mean)[..., 0])[:, None, :]
        varying = diagonal - self.mean[..., 0].square()
        self.scale = varying.mean(-1).maximum(1e-12 * diagonal.mean(-1)).clamp_min(TINY)

    def solve(self, ridge: float) -> Tensor:
        """The weights minus the base."""
        self._factor = self.rest.new_empty(0)  # frees the last ridge's before the next is computed
        centred = self.moments.second.baddbmm_(self.mean, self.mean.mT, alpha=-1)
        self._factor = damped_factor_(centred, ridge * self.scale)
        return torch.cholesky_solve(self.rest, self._factor).mT

    def explained(self, delta: Tensor) -> Tensor:
        """A matrix whose left singular vectors are output directions, in the order of the variance by delta."""
        return delta @ self._factor


class FromRows:
    """The system of n equations, for fewer rows than columns; the same solution."""

    def __init__(self, moments: Moments, base: Tensor, shifted: bool) -> None:
        if moments.rows is None:
            raise ValueError("the rows were not stored")
        self.x, y = moments.rows
        if shifted:
            self.x, y = self.x - self.x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
        self.count = self.x.shape[1]
        self.rest = (y - self.x @ base.mT.to(self.x)).double() / self.count
        self.gram = (self.x @ self.x.mT).double() / self.count
        self.scale = (self.gram.diagonal(dim1=-2, dim2=-1).sum(-1) / self.x.shape[2]).clamp_min(TINY)

    def solve(self, ridge: float) -> Tensor:
        self._ridge = ridge * self.scale
        parts = torch.cholesky_solve(self.rest, damped_factor_(self.gram.clone(), self._ridge))
        return (parts.mT.to(self.x) @ self.x).double()

    def explained(self, delta: Tensor) -> Tensor:
        outputs = (delta.to(self.x) @ self.x.mT).double() / self.count**0.5
        return torch.cat([outputs, delta * self._ridge.sqrt()[:, None, None]], -1)


def damped_factor_(matrix: Tensor, ridge: Tensor) -> Tensor:
    """Add the ridge to the diagonal in place, and return the Cholesky factor."""
    matrix.diagonal(dim1=-2, dim2=-1).add_(ridge[:, None])
    return torch.linalg.cholesky_ex(matrix)[0]


def leading(matrix: Tensor, rank: int) -> Tensor:
    """The first left singular vectors; those of a large matrix by a randomised SVD with a fixed seed."""
    if min(matrix.shape[-2:]) <= NARROW:
        return torch.linalg.svd(matrix, full_matrices=False).U[..., :rank]
    with PrivateRandom():
        return torch.svd_lowrank(matrix, q=rank + 8, niter=4)[0][..., :rank]


# Coefficients of given weights, from the moments of one group of rows.


def fit_rows(moments: Moments, directions: Sequence[Tensor]) -> Tensor:
    """The least-squares coefficients (I, R) of W_c = sum_i s_ic D_ic for each output row c, with a free shift."""
    covariance, cross = moments.covariances()
    stacked = torch.stack([direction.double() for direction in directions])  # (I, R, K)
    system = torch.einsum("irk,jrk->rij", stacked @ covariance[0], stacked)
    right = torch.einsum("irk,kr->ri", stacked, cross[0])
    return damped_solve(system, right).T


def fit_scalars(moments: Moments, directions: Sequence[Tensor], shifts: Sequence[Tensor]) -> Tensor:
    """The least-squares scalars of Y = sum_i s_i (X D_i' + t_i), without a free shift."""
    d = torch.stack([direction.double() for direction in directions])
    t = torch.stack([shift.double() for shift in shifts])
    dxx = d @ moments.second[0]  # (I, R, K)
    dm = d @ moments.mean_x[0]  # (I, R): the mean of X D_i'
    num = len(directions)
    system = dxx.reshape(num, -1) @ d.reshape(num, -1).T
    system = system + dm @ t.T + t @ dm.T + t @ t.T
    aim = (d * moments.mixed[0].T).sum((1, 2)) + t @ moments.mean_y[0]
    return damped_solve(system[None], aim[None])[0]


def damped_solve(system: Tensor, right: Tensor) -> Tensor:
    """Solve small symmetric systems that may be singular (equal sources, silent channels)."""
    scale = system.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(TINY)
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    damped = system + 1e-9 * scale[:, None, None] * eye
    return torch.linalg.lstsq(damped, right[..., None]).solution[..., 0]
