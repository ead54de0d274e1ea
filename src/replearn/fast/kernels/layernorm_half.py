"""LayerNorm with a half-precision result, for inference under autocast.

torch normalises in float32, stores that, and casts it for the linear layer behind. The kernel stores what that
layer reads. Both compute in float32 and differ in the order of sums alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ._dispatch import HALF, aligned, compute_dtype, needs_grad, runs_eagerly, triton_runs_on

MAX_WIDTH = 8192  # a program holds a whole row
_library = torch.library.Library("replearn", "FRAGMENT")  # keeps the operation registered
_library.define("layernorm_half(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) -> Tensor")


def layernorm_half(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> Tensor:
    """torch.layer_norm of x in float32 over its last dimension, in the dtype of autocast.

    The kernel has no gradient: torch computes calls that need one, those that are compiled or exported, and those
    without autocast, and returns float32.

    >>> layernorm_half(torch.tensor([[1.0, 3.0]]), (2,), None, None)
    tensor([[-1.0000,  1.0000]])
    """
    given = x, shape, weight, bias, eps
    made: Tensor
    if has_torch_function_unary(x):  # an fx proxy
        made = handle_torch_function(layernorm_half, (x,), *given)
    elif runs_eagerly() and fits(*given):
        made = torch.ops.replearn.layernorm_half.default(x, weight, bias, eps, compute_dtype(x))
    else:
        made = reference(*given)
    return made


def reference(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> Tensor:
    return torch.layer_norm(x, shape, weight, bias, eps)


def fits(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> bool:
    """True if the kernel computes this call."""
    if needs_grad(x, weight, bias) or not triton_runs_on(x.device):
        return False
    return (
        x.dtype is torch.float32
        and compute_dtype(x) in HALF
        and len(shape) == 1
        and shape[0] == x.shape[-1] <= MAX_WIDTH
        and 0 < x.numel() < 2**31  # the kernel has 32-bit offsets
        and x.is_contiguous()
        and (weight is None or _is_row(weight, x))
        and (bias is None or _is_row(bias, x))
    )


def examples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments that the kernel takes under autocast, for tests."""
    if dtype in HALF:
        yield 30 + torch.randn(2, 5, 48, device=device), (48,), *torch.randn(2, 48, device=device), 1e-6
        yield torch.randn(3, 100, device=device), (100,), None, None


def _is_row(tensor: Tensor, x: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.get_device() == x.get_device()


@torch.library.impl(_library, "layernorm_half", "CUDA")
@torch.library.impl(_library, "layernorm_half", "CPU")  # in Triton's interpreter
def _launch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    from ._triton.layernorm_half import launch

    out = torch.empty_like(x, dtype=dtype)
    x, weight, bias = aligned(x, weight, bias)
    launch(x, weight, bias, float(eps), out)  # an integer would compile another kernel
    return out


@torch.library.register_fake("replearn::layernorm_half", lib=_library)  # type: ignore[untyped-decorator]
def _fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)
