"""A residual layer as a torch operation: what it computes, shapes alone, and which tensors fit.

    y = u + (W h + b)            how each half of a transformer's block ends
    y = u + (W h + b + B u)      with an operator in it that the layer has taken up

under autocast: h, W and B are in half precision, u and y in float32. torch makes three passes over y of the first
(the product, the sum) and seven of the second (u is rounded, two products, the sum); the kernel makes one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.flop_counter import register_flop_formula

from ..graphs.repeating import Run, first_run, kind_of, known_run, remember
from ._transforms import transformed
from ._triton.linear_residual_tiles import WIDTH, tile_for
from .conv3x3_small import kernels_run_on as kernels_run_on

_HALF = (torch.bfloat16, torch.float16)
_library = torch.library.Library("replearn", "FRAGMENT")  # keeps the operation registered
_library.define("residual_linear(Tensor u, Tensor h, Tensor weight, Tensor? bias, Tensor? branch) -> Tensor")


def residual_linear(
    u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None = None, branch: Tensor | None = None
) -> Tensor:
    """u + linear(h, weight, bias), and + linear(u, branch) where there is one: by our kernel, or by torch.

    The kernel takes u in float32 and h and the weights in half precision, with widths that are multiples of 64,
    on a GPU with Triton, and knows no gradients: where one is wanted, or code is compiled or exported, torch
    computes the same.

    >>> residual_linear(torch.zeros(2, 5, 4), torch.ones(2, 5, 3), torch.ones(4, 3)).unique()
    tensor([3.])
    """
    made: Tensor
    if has_torch_function_unary(u):  # a stand-in of torch.fx, which traces a graph anew when it is unpickled
        made = handle_torch_function(residual_linear, (u,), u, h, weight, bias, branch)
        return made
    given = u, h, weight, bias, branch
    if not may_launch():
        return usual(*given)
    kind = kind_of("residual_linear", given)
    if (run := known_run(kind)) is not None:
        return run(*given)
    if not fits(*given):
        return remember(kind, usual)(*given)
    return first_run(kind, launched, torch.ops.replearn.residual_linear.default, given)


def may_launch() -> bool:
    """Whether nobody makes a program of this, which is to run without this package, or takes it apart."""
    return not (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or transformed())


def usual(u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None) -> Tensor:
    v = F.linear(h, weight, bias)
    return u + v if branch is None else u + (v + F.linear(u.type_as(v), branch))


def fits(u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None) -> bool:
    """Whether our kernel computes this, here and now."""
    if wants_gradient(u, h, weight, bias, branch) or not kernels_run_on(u.device):
        return False
    kind, (width, inner) = h.dtype, weight.shape
    return (
        u.dtype is torch.float32
        and kind in _HALF
        and kind is weight.dtype
        and u.shape[-1] == width
        and h.shape[-1] == inner
        and u.shape[:-1] == h.shape[:-1]
        and can_be_cut(width, inner)
        and 0 < u.numel() < 2**31 > h.numel()  # offsets are 32-bit numbers in the kernel
        and u.get_device() == h.get_device() == weight.get_device()
        and u.is_contiguous()
        and h.is_contiguous()
        and weight.is_contiguous()
        and (bias is None or (bias.numel() == width and bias.is_contiguous()))  # torch spreads a single number
        and (branch is None or (branch.dtype is kind and branch.is_contiguous()))
    )


def wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def can_be_cut(width: int, inner: int) -> bool:
    """Whether tiles of our kernel cover a layer of these widths."""
    return width % WIDTH == 0 and inner % WIDTH == 0


@torch.library.impl(_library, "residual_linear", "CUDA")
@torch.library.impl(_library, "residual_linear", "CPU")  # in Triton's interpreter, for tests
def compute(u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None) -> Tensor:
    return launched(u, h, weight, bias, branch)[0]


def launched(
    u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None
) -> tuple[Tensor, Run | None]:
    """The result, and what computes it of other such tensors, unless some begin where the kernel can't read."""
    given, out, (width, inner) = aligned(u, h, weight, bias, branch), torch.empty_like(u), weight.shape
    tile = tile_for(u.numel() // width, inner, width, branched=branch is not None)
    launch = kernels().launch(*given, out, tile)
    moved = any(mine is not theirs for mine, theirs in zip(given, (u, h, weight, bias, branch), strict=True))
    if moved or launch is None:
        return out, None
    again = launch.again()

    def run(u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None) -> Tensor:
        out = torch.empty_like(u)
        again(u, h, weight, weight if bias is None else bias, weight if branch is None else branch, out)
        return out

    return out, run


@cache
def kernels() -> Any:
    """The module with the kernel; Triton need not be there where it is not used."""
    from ._triton import linear_residual as module

    return module


def aligned(*tensors: Tensor | None) -> list[Tensor | None]:
    """Where their numbers begin at multiples of 16 bytes, as the kernel reads them; a part of a tensor may not."""
    return [tensor if tensor is None or tensor.data_ptr() % 16 == 0 else tensor.clone() for tensor in tensors]


@torch.library.register_fake("replearn::residual_linear", lib=_library)  # type: ignore[untyped-decorator]
def empty_result(u: Tensor, *others: Tensor | None) -> Tensor:
    return torch.empty_like(u)


@register_flop_formula(torch.ops.replearn.residual_linear, get_raw=True)
def flops_of(
    u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None, out_val: Any = None
) -> int:
    """Two for a multiply and add, as torch counts."""
    width, inner = weight.shape
    return 2 * u.numel() * (inner + (0 if branch is None else width))
