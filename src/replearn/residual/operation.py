"""A residual layer as a torch operation: what it computes, shapes alone, and which tensors fit.

    y = u + (W h + b)            how each half of a transformer's block ends
    y = u + (W h + b + B u)      with an operator in it that the layer has taken up

under autocast: h, W and B are in half precision, u and y in float32. torch makes three passes over y of the first
(the product, the sum) and seven of the second (u is rounded, two products, the sum); the kernel makes one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..narrow.operation import kernels_run_on as kernels_run_on
from ..narrow.operation import transformed
from .tiles import WIDTH, tile_for

_KINDS = {(torch.float32, half, half) for half in (torch.bfloat16, torch.float16)}
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
    if is_traced() or transformed() or not fits(u, h, weight, bias, branch):
        return usual(u, h, weight, bias, branch)
    made: Tensor = torch.ops.replearn.residual_linear.default(u, h, weight, bias, branch)
    return made


def is_traced() -> bool:
    """Whether somebody makes a program of this, which is to run without this package."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def usual(u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None) -> Tensor:
    v = F.linear(h, weight, bias)
    return u + v if branch is None else u + (v + F.linear(u.type_as(v), branch))


def fits(u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None) -> bool:
    """Whether our kernel computes this, here and now."""
    tensors = [tensor for tensor in (u, h, weight, bias, branch) if tensor is not None]
    width, inner = weight.shape
    return (
        kernels_run_on(u.device)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
        and (u.dtype, h.dtype, weight.dtype) in _KINDS
        and (branch is None or branch.dtype is weight.dtype)
        and u.shape == (*h.shape[:-1], width)
        and h.shape[-1] == inner
        and can_be_cut(width, inner)
        and 0 < u.numel() < 2**31 > h.numel()  # offsets are 32-bit numbers in the kernel
        and all(tensor.is_contiguous() and tensor.device == u.device for tensor in tensors)
    )


def can_be_cut(width: int, inner: int) -> bool:
    """Whether tiles of our kernel cover a layer of these widths."""
    return width % WIDTH == 0 and inner % WIDTH == 0


@torch.library.impl(_library, "residual_linear", "CUDA")
@torch.library.impl(_library, "residual_linear", "CPU")  # in Triton's interpreter, for tests
def compute(u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None) -> Tensor:
    from .kernels import launch

    out = torch.empty_like(u)
    u, h = aligned(u), aligned(h)
    launch(u, h, weight, bias, branch, out, tile_for(u.numel() // u.shape[-1], u.shape[-1]))
    return out


def aligned(tensor: Tensor) -> Tensor:
    """Where its numbers begin at a multiple of 16 bytes, as the kernel reads them; a part of another may not."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@torch.library.register_fake("replearn::residual_linear", lib=_library)  # type: ignore[untyped-decorator]
def empty_result(u: Tensor, *others: Tensor | None) -> Tensor:
    return torch.empty_like(u)


def flops_of(u: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, branch: Tensor | None) -> int:
    """Two for a multiply and add, as torch counts."""
    width, inner = weight.shape
    return 2 * u.numel() * (inner + (0 if branch is None else width))
