"""Linear layer plus residual, for inference under autocast.

    y = u + (W h + b)            the end of each half of a transformer block
    y = u + (W h + b + B u)      with a merged operator in it

h, W and B are in half precision, u and y in float32. The kernel makes one pass over y; torch makes three for the
first form (product, sum) and seven for the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ._dispatch import HALF, aligned, leaf, needs_grad, register_operation, runs_eagerly, triton_runs_on

WIDTH = 64  # inner and outer widths are multiples of it


@dataclass(frozen=True, kw_only=True)
class Tile:
    """BLOCK_M, BLOCK_N and BLOCK_K, and launch options."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int


# few rows take many short programs
FEW = Tile(rows=32, columns=32, inner=128, num_warps=4, num_stages=4)
FEW_BRANCHED = Tile(rows=16, columns=64, inner=128, num_warps=4, num_stages=4)
TALL = Tile(rows=128, columns=64, inner=64, num_warps=4, num_stages=3)
WIDE = Tile(rows=64, columns=128, inner=64, num_warps=4, num_stages=4)  # casts u less often


def tile_for(rows: int, inner: int, width: int, *, branched: bool) -> Tile:
    """The tile for a layer of these widths, which are multiples of 64."""
    if rows <= 1024:
        tile = FEW_BRANCHED if branched else FEW
        even = inner % tile.inner == 0 and (not branched or width % tile.inner == 0)
        return tile if even else replace(tile, inner=WIDTH)
    # one or two tiles per SM: wide ones fill them better
    wide = branched or (inner > 512 and rows <= 8192)
    return WIDE if wide and width % WIDE.columns == 0 else TALL


@leaf
def linear_residual(
    u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None = None, branch: Tensor | None = None
) -> Tensor:
    """u + linear(h, weight, bias), plus linear(u, branch) if there is one.

    The kernel takes u in float32, h and the weights in half precision, and widths that are multiples of 64. It has
    no gradient: torch computes calls that need one, and those that are compiled or exported.

    >>> linear_residual(torch.zeros(2, 5, 4), torch.ones(2, 5, 3), torch.ones(4, 3)).unique()
    tensor([3.])
    """
    given = u, h, weight, bias, branch
    made: Tensor = _operation(*given) if runs_eagerly() and fits(*given) else reference(*given)
    return made


def reference(
    u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None = None, branch: Tensor | None = None
) -> Tensor:
    v = F.linear(h, weight, bias)
    return u + v if branch is None else u + (v + F.linear(u.type_as(v), branch))


def fits(u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None = None, branch: Tensor | None = None) -> bool:
    """True if the kernel computes this call."""
    dtype, (width, inner) = h.dtype, weight.shape
    return (
        not needs_grad(u, h, weight, bias, branch)
        and triton_runs_on(u.device)
        and u.dtype is torch.float32
        and dtype in HALF
        and dtype is weight.dtype
        and u.shape[-1] == width
        and h.shape[-1] == inner
        and u.shape[:-1] == h.shape[:-1]
        and can_tile(width, inner)
        and 0 < u.numel() < 2**31 > h.numel()  # the kernel has 32-bit offsets
        and u.get_device() == h.get_device() == weight.get_device()
        and u.is_contiguous()
        and h.is_contiguous()
        and weight.is_contiguous()
        and (bias is None or (bias.numel() == width and bias.is_contiguous()))  # torch broadcasts a single number
        and (branch is None or (branch.dtype is dtype and branch.is_contiguous()))
    )


def examples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments that the kernel takes, for tests."""
    if dtype in HALF:
        weight, branch = (0.1 * torch.randn(64, inner, device=device, dtype=dtype) for inner in (128, 64))
        for rows, bias, added in ((3, None, None), (70, torch.randn(64, device=device), branch)):
            h = torch.randn(2, rows, 128, device=device, dtype=dtype)
            yield torch.randn(2, rows, 64, device=device), h, weight, bias, added


def can_tile(width: int, inner: int) -> bool:
    """True if the kernel's tiles cover a layer of these widths."""
    return width % WIDTH == 0 and inner % WIDTH == 0


def _launch(u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None) -> Tensor:
    from ._triton.linear_residual import launch

    out, (width, inner) = torch.empty_like(u), weight.shape
    tile = tile_for(u.numel() // width, inner, width, branched=branch is not None)
    u, h, weight, bias, branch = aligned(u, h, weight, bias, branch)
    launch(u, h, weight, bias, branch, out, tile)
    return out


def _flops(
    u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None, out_val: Any = None
) -> int:
    width, inner = weight.shape
    return 2 * u.numel() * (inner + (0 if branch is None else width))


_operation = register_operation(
    "linear_residual(Tensor u, Tensor h, Tensor weight, Tensor? bias, Tensor? branch) -> Tensor",
    _launch,
    fake=lambda u, *others: torch.empty_like(u),
    flops=_flops,
)
