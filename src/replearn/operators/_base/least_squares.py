"""Coefficients of given directions by least squares, from the moments of one group of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .ridge import Moments


def fit_rows(moments: Moments, directions: Sequence[Tensor]) -> Tensor:
    """Per output row c, the coefficients (I, R) of W_c = sum_i s_ic D_ic that fit best, with a free shift."""
    covariance, cross = moments.products()
    stacked = torch.stack([direction.double() for direction in directions])  # (I, R, K)
    system = torch.einsum("irk,jrk->rij", stacked @ covariance[0], stacked)
    right = torch.einsum("irk,kr->ri", stacked, cross[0])
    return damped_solve(system, right).T


def fit_scalars(moments: Moments, directions: Sequence[Tensor], shifts: Sequence[Tensor]) -> Tensor:
    """Scalars of Y = sum_i s_i (F D_i^T + t_i); nothing else is free."""
    d = torch.stack([direction.double() for direction in directions])
    t = torch.stack([shift.double() for shift in shifts])
    made = d @ moments.second[0]  # (I, R, K)
    dm = d @ moments.mean_x[0]  # (I, R): the mean of F D_i^T
    num = len(directions)
    system = made.reshape(num, -1) @ d.reshape(num, -1).T
    system = system + dm @ t.T + t @ dm.T + t @ t.T
    aim = (d * moments.mixed[0].T).sum((1, 2)) + t @ moments.mean_y[0]
    return damped_solve(system[None], aim[None])[0]


def damped_solve(system: Tensor, right: Tensor) -> Tensor:
    """Solve small symmetric systems that may be singular (equal sources, silent channels)."""
    scale = system.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device)
    damped = system + 1e-9 * scale[:, None, None] * eye
    return torch.linalg.lstsq(damped, right[..., None]).solution[..., 0]
