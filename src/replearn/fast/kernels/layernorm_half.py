"""A LayerNorm whose result is in half precision as a torch operation, and which tensors it takes.

Under autocast torch normalises in float32, stores the result, and rounds it for the linear layer that it goes
into. The kernel stores what that layer reads. Both compute in float32, and differ in the order of sums alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..graphs.repeating import Run, first_run, kind_of, known_run, remember
from .conv3x3_small import computed_dtype, kernels_run_on
from .linear_residual import aligned, may_launch, wants_gradient

WIDEST = 8192  # numbers of a row that a program can hold
_HALF = (torch.bfloat16, torch.float16)
_library = torch.library.Library("replearn", "FRAGMENT")  # keeps the operation registered
_library.define("rounded_norm(Tensor x, Tensor? weight, Tensor? bias, float epsilon, ScalarType dtype) -> Tensor")


def rounded_norm(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, epsilon: float = 1e-5
) -> Tensor:
    """torch.layer_norm of x in float32 over its last dimension, in the dtype that autocast computes in.

    By our kernel on a GPU with Triton, which knows no gradients: where one is wanted, code is compiled or
    exported, or there is no autocast, torch computes it, and rounds nothing.

    >>> rounded_norm(torch.tensor([[1.0, 3.0]]), (2,), None, None)
    tensor([[-1.0000,  1.0000]])
    """
    made: Tensor
    if has_torch_function_unary(x):  # as in residual_linear
        made = handle_torch_function(rounded_norm, (x,), x, shape, weight, bias, epsilon)
        return made
    if not may_launch():
        return torch.layer_norm(x, shape, weight, bias, epsilon)
    dtype = computed_dtype(x)
    kind = kind_of("rounded_norm", (x, weight, bias), *shape, epsilon, dtype)
    if (run := known_run(kind)) is not None:
        return run(x, weight, bias)
    if not fits(x, shape, weight, bias):
        usual = remember(kind, lambda x, weight, bias: torch.layer_norm(x, shape, weight, bias, epsilon))
        return usual(x, weight, bias)
    given = x, weight, bias, epsilon, dtype
    return first_run(kind, launched, torch.ops.replearn.rounded_norm.default, given)


def fits(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether our kernel computes this, here and now."""
    if wants_gradient(x, weight, bias) or not kernels_run_on(x.device):
        return False
    return (
        x.dtype is torch.float32
        and computed_dtype(x) in _HALF
        and len(shape) == 1
        and shape[0] == x.shape[-1] <= WIDEST
        and 0 < x.numel() < 2**31  # offsets are 32-bit numbers in the kernel
        and x.is_contiguous()
        and (weight is None or is_row(weight, x))
        and (bias is None or is_row(bias, x))
    )


def is_row(tensor: Tensor, x: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.get_device() == x.get_device()


@torch.library.impl(_library, "rounded_norm", "CUDA")
@torch.library.impl(_library, "rounded_norm", "CPU")  # in Triton's interpreter, for tests
def compute(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, dtype: torch.dtype) -> Tensor:
    return launched(x, weight, bias, epsilon, dtype)[0]


def launched(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Run | None]:
    """The result, and what computes it of other such tensors, unless some begin where the kernel can't read."""
    given, out = aligned(x, weight, bias), torch.empty_like(x, dtype=dtype)
    launch = kernels().launch(*given, float(epsilon), out)  # an integer would be another kernel
    moved = any(mine is not theirs for mine, theirs in zip(given, (x, weight, bias), strict=True))
    if moved or launch is None:
        return out, None
    again = launch.again()

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        out = torch.empty_like(x, dtype=dtype)
        again(x, x if weight is None else weight, x if bias is None else bias, out)
        return out

    return out, run


@cache
def kernels() -> Any:
    """The module with the kernel; Triton need not be there where it is not used."""
    from ._triton import layernorm_half as module

    return module


@torch.library.register_fake("replearn::rounded_norm", lib=_library)  # type: ignore[untyped-decorator]
def empty_result(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, dtype: torch.dtype
) -> Tensor:
    return torch.empty_like(x, dtype=dtype)
