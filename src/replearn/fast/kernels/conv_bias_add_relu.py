"""Convolution, bias, residual sum and ReLU in one launch of cuDNN, for inference.

    y = relu(W * x + b)
    y = relu(W * x + b + other)

torch launches the convolution, its bias, the sum and the ReLU one after another, each a pass over y.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...costs.precision import convolves_in_tf32
from ._dispatch import leaf, needs_grad, runs_eagerly

Pair = tuple[int, int]
# Largest difference of two results, relative to the largest summand: four roundings of half precision or TF32, and
# some bits for another order of sums in full precision.
ROUNDINGS, FULL_PRECISION = 4, {torch.float32: 2.0**-14, torch.float64: 2.0**-40}


@leaf
def conv_bias_add_relu(
    x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None = None, *sizes: Pair
) -> Tensor:
    """relu(conv2d(x, weight, bias, *sizes) + other); the sizes are stride, padding and dilation.

    cuDNN has no gradient for it: torch computes calls that need one, and those that are compiled or exported.

    >>> conv_bias_add_relu(torch.ones(1, 3, 4, 4), -torch.ones(2, 3, 3, 3), torch.full((2,), 28.0)).unique()
    tensor([1.])
    """
    given: Any = (x, weight, bias, other, *sizes)
    return fused(*given) if fits(*given) else reference(*given)


def reference(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None = None, *sizes: Any) -> Tensor:
    made = F.conv2d(x, weight, bias, *sizes)
    return torch.relu_(made if other is None else made + other)


def fused(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, *sizes: Any) -> Tensor:
    made: Tensor
    x, (stride, padding, dilation) = x.to(weight.dtype), sizes  # the cast is autocast's
    if other is None:
        made = torch.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, 1)
    else:
        made = torch.cudnn_convolution_add_relu(x, weight, other, 1.0, bias, stride, padding, dilation, 1)
    return made


def fits(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None = None, *sizes: Pair) -> bool:
    """True if cuDNN computes this call. Checked at every call, so it is short."""
    return (
        weight.is_cuda
        and len(sizes) == 3
        and bias.dtype is weight.dtype
        and (other is None or (other.dtype is weight.dtype and len(other) == len(x)))
        and x.numel() > 0
        and not needs_grad(x, weight, bias, other)
        and torch.backends.cudnn.enabled
        and not torch.are_deterministic_algorithms_enabled()
        and not torch.backends.cudnn.deterministic
        and runs_eagerly()
    )


def examples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments that cuDNN takes, for tests."""
    x, other = (torch.randn(2, width, 5, 5, device=device, dtype=dtype) for width in (8, 16))
    weight, bias = 0.1 * torch.randn(16, 8, 3, 3, device=device), torch.randn(16, device=device)
    for summand in (None, other):
        yield x, weight.to(dtype), bias.to(dtype), summand, (1, 1), (1, 1), (1, 1)


def has_cudnn(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def failure_of(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, *sizes: Any) -> str | None:
    """What is wrong with cuDNN's result for these tensors, if anything is."""
    given: Any = (x, weight, bias, other, *sizes)
    expected = reference(*given)
    if any(each is not None and each.dtype is not weight.dtype for each in (bias, other, expected)):
        return f"its weight is in {weight.dtype}, and its summands or its result are not"
    if other is not None and other.shape != expected.shape:
        return f"its sum broadcasts {list(other.shape)} to {list(expected.shape)}"
    summands = [float(tensor.abs().max()) for tensor in (expected, bias, other) if tensor is not None]
    if not 0 < summands[0] < float("inf"):
        return "its result on the example is zero, inf or NaN"
    # cuDNN reads its output as a summand times zero: NaN in the memory that it is likely to get would show
    torch.full_like(expected, torch.nan)
    try:
        found = fused(*given)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return f"cuDNN says: {(str(error).splitlines() or ['nothing'])[0]}"
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return f"cuDNN returns {list(found.shape)} in {found.dtype}"
    off, largest = float(found.sub(expected).abs_().max()), max(summands)
    right = off <= tolerance(weight.dtype) * largest  # False for NaN
    return None if right else f"cuDNN's result is off by {off:.2g}, of values up to {largest:.2g}"


def tolerance(dtype: torch.dtype) -> float:
    """The largest difference of two results, relative to the largest summand."""
    if dtype in FULL_PRECISION and not (dtype is torch.float32 and convolves_in_tf32()):
        return FULL_PRECISION[dtype]
    # TF32 has as many bits as float16
    return ROUNDINGS * torch.finfo(torch.float16 if dtype is torch.float32 else dtype).eps
