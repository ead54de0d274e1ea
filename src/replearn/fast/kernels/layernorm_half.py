"""LayerNorm with a half-precision result, for inference under autocast.

torch normalises in float32, stores that, and casts it for the linear layer behind. The kernel stores what that
layer reads. Both compute in float32 and differ in the order of sums alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._dispatch import (
    HALF,
    aligned,
    compute_dtype,
    leaf,
    needs_grad,
    register_operation,
    runs_eagerly,
    triton_runs_on,
)

MAX_WIDTH = 8192  # a program holds a whole row
Row = Tensor | None


@leaf
def layernorm_half(x: Tensor, shape: tuple[int, ...], weight: Row, bias: Row, eps: float = 1e-5) -> Tensor:
    """torch.layer_norm of x in float32 over its last dimension, in the dtype of autocast.

    The kernel has no gradient: torch computes calls that need one, those that are compiled or exported, and those
    without autocast, and returns float32.

    >>> layernorm_half(torch.tensor([[1.0, 3.0]]), (2,), None, None)
    tensor([[-1.0000,  1.0000]])
    """
    if runs_eagerly() and fits(x, shape, weight, bias):
        made: Tensor = _operation(x, weight, bias, eps, compute_dtype(x))
        return made
    return reference(x, shape, weight, bias, eps)


def reference(x: Tensor, shape: tuple[int, ...], weight: Row, bias: Row, eps: float = 1e-5) -> Tensor:
    return torch.layer_norm(x, shape, weight, bias, eps)


def fits(x: Tensor, shape: tuple[int, ...], weight: Row, bias: Row, eps: float = 1e-5) -> bool:
    """True if the kernel computes this call."""
    return (
        not needs_grad(x, weight, bias)
        and triton_runs_on(x.device)
        and x.dtype is torch.float32
        and compute_dtype(x) in HALF
        and len(shape) == 1
        and shape[0] == x.shape[-1] <= MAX_WIDTH
        and 0 < x.numel() < 2**31  # the kernel has 32-bit offsets
        and x.is_contiguous()
        and all(row is None or _is_row(row, x) for row in (weight, bias))
    )


def examples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments that the kernel takes under autocast, for tests."""
    if dtype in HALF:
        yield 30 + torch.randn(2, 5, 48, device=device), (48,), *torch.randn(2, 48, device=device), 1e-6
        yield torch.randn(3, 100, device=device), (100,), None, None


def _is_row(tensor: Tensor, x: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.get_device() == x.get_device()


def _launch(x: Tensor, weight: Row, bias: Row, eps: float, dtype: torch.dtype) -> Tensor:
    from ._triton.layernorm_half import launch

    out = torch.empty_like(x, dtype=dtype)
    x, weight, bias = aligned(x, weight, bias)
    launch(x, weight, bias, float(eps), out)  # an integer would compile another kernel
    return out


_operation = register_operation(
    "layernorm_half(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType dtype) -> Tensor",
    _launch,
    fake=lambda x, weight, bias, eps, dtype: torch.empty_like(x, dtype=dtype),
)
