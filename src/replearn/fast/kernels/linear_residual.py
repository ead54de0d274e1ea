"""Linear layer plus residual, for inference under autocast.

    y = u + (W h + b)            the end of each half of a transformer block
    y = u + (W h + b + B u)      with a merged operator in it

h, W and B are in half precision, u and y in float32. The kernel makes one pass over y; torch makes three for the
first form (product, sum) and seven for the second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.flop_counter import register_flop_formula

from ._dispatch import HALF, aligned, needs_grad, runs_eagerly, triton_runs_on
from ._triton.linear_residual_tiles import WIDTH, tile_for

_library = torch.library.Library("replearn", "FRAGMENT")  # keeps the operation registered
_library.define("linear_residual(Tensor u, Tensor h, Tensor weight, Tensor? bias, Tensor? branch) -> Tensor")


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
    made: Tensor
    if has_torch_function_unary(u):  # an fx proxy: a pickled graph is traced again when it is loaded
        made = handle_torch_function(linear_residual, (u,), *given)
    elif runs_eagerly() and fits(*given):
        made = torch.ops.replearn.linear_residual.default(*given)
    else:
        made = reference(*given)
    return made


def reference(
    u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None = None, branch: Tensor | None = None
) -> Tensor:
    v = F.linear(h, weight, bias)
    return u + v if branch is None else u + (v + F.linear(u.type_as(v), branch))


def fits(u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None = None, branch: Tensor | None = None) -> bool:
    """True if the kernel computes this call."""
    if needs_grad(u, h, weight, bias, branch) or not triton_runs_on(u.device):
        return False
    dtype, (width, inner) = h.dtype, weight.shape
    return (
        u.dtype is torch.float32
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


@torch.library.impl(_library, "linear_residual", "CUDA")
@torch.library.impl(_library, "linear_residual", "CPU")  # in Triton's interpreter
def _launch(u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None) -> Tensor:
    from ._triton.linear_residual import launch

    out, (width, inner) = torch.empty_like(u), weight.shape
    tile = tile_for(u.numel() // width, inner, width, branched=branch is not None)
    u, h, weight, bias, branch = aligned(u, h, weight, bias, branch)
    launch(u, h, weight, bias, branch, out, tile)
    return out


@torch.library.register_fake("replearn::linear_residual", lib=_library)  # type: ignore[untyped-decorator]
def _fake(u: Tensor, *others: Tensor | None) -> Tensor:
    return torch.empty_like(u)


@register_flop_formula(torch.ops.replearn.linear_residual, get_raw=True)
def _flops(
    u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None, out_val: Any = None
) -> int:
    width, inner = weight.shape
    return 2 * u.numel() * (inner + (0 if branch is None else width))
