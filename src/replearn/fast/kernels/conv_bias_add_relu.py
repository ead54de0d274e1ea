"""A convolution, the sum and the ReLU after it, in one launch of cuDNN: which a model asks for as a whole.

    y = relu(W * x + b)
    y = relu(W * x + b + other)

torch launches the convolution, its bias, the sum and the ReLU one after the other, each a pass over y. That cuDNN
does the same at once is found out by a trial, of each convolution on its own tensors; asking before every one
would take Python longer than it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from math import isfinite

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ...costs.precision import convolves_in_tf32

Pair = tuple[int, int]
Given = tuple[Tensor, Tensor, Tensor, Tensor | None, Pair, Pair, Pair]  # as `convolve_relu` takes it
How = Callable[[*Given], Tensor]
# Of the largest number, which two ways to compute may differ by: four roundings to half precision or TF32, which
# torch makes two or three of, and some bits that sums in another order cost where all is in full
ROUNDINGS, IN_FULL = 4, {torch.float32: 2.0**-14, torch.float64: 2.0**-40}


class _Here(threading.local):
    how: How | None = None


_here = _Here()


def convolve_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    other: Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
) -> Tensor:
    """relu(conv2d(x, weight, bias) + other): as the model around says (`Computing`), or by torch's operations.

    >>> convolve_relu(torch.ones(1, 3, 4, 4), -torch.ones(2, 3, 3, 3), torch.full((2,), 28.0)).unique()
    tensor([1.])
    """
    given = x, weight, bias, other, stride, padding, dilation
    if has_torch_function_unary(x):  # as in residual_linear
        made: Tensor = handle_torch_function(convolve_relu, (x,), *given)
        return made
    return (_here.how or usual)(*given)


def usual(
    x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    made = F.conv2d(x, weight, bias, stride, padding, dilation)
    return torch.relu_(made if other is None else made + other)


def at_once(
    x: Tensor, weight: Tensor, bias: Tensor, other: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    made: Tensor
    if x.dtype is not weight.dtype:  # as autocast casts it
        x = x.to(weight.dtype)
    if other is None:
        made = torch.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, 1)
    else:
        made = torch.cudnn_convolution_add_relu(x, weight, other, 1.0, bias, stride, padding, dilation, 1)
    return made


class Computing(AbstractContextManager[None]):
    """Inside, in this thread, all such convolutions are computed so."""

    def __init__(self, how: How) -> None:
        self._how = how

    def __enter__(self) -> None:
        self._before, _here.how = _here.how, self._how

    def __exit__(self, *error: object) -> None:
        _here.how = self._before


class Trial:
    """Computes as torch does, and compares each convolution with what cuDNN gives at once for the same tensors.

    The memory that cuDNN is likely to write to is filled with NaN before: torch hands it that as a summand where
    there is none, times zero, and zero times what happens to lie there may be NaN. `failure` says what was wrong;
    `unsaid` why nothing could be found out, as of numbers that are not finite, or all zero.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._hindered: str | None = None
        self._seen = False  # any number but zero

    @property
    def unsaid(self) -> str | None:
        return self._hindered or (None if self._seen else "all numbers were zero")

    def __call__(self, *given: *Given) -> Tensor:
        expected = usual(*given)
        if self.failure is None and self._hindered is None and expected.numel():
            try:
                self._compare(expected, given)
            except torch.OutOfMemoryError:
                self._hindered = "there was no memory left to compare the two"
        return expected

    def _compare(self, expected: Tensor, given: Given) -> None:
        x, _, bias, other, *_ = given
        sizes = [float(tensor.abs().max()) for tensor in (x, expected, bias, other) if tensor is not None]
        if not all(map(isfinite, sizes)):
            self._hindered = "there were inf or NaN in it"
            return
        self._seen = self._seen or sizes[1] > 0
        self.failure = failure_of(expected, max(sizes[1:]), given)


def failure_of(expected: Tensor, largest: float, given: Given) -> str | None:
    """What is wrong with cuDNN's result, if anything is; `largest` is so of all that is summed up to it."""
    _, weight, bias, other, *_ = given
    if any(each is not None and each.dtype is not weight.dtype for each in (bias, other, expected)):
        return f"its weight is in {weight.dtype}, and what it is added to or gives is not"
    if other is not None and other.shape != expected.shape:
        return f"its sum spreads {list(other.shape)} to {list(expected.shape)}"
    torch.full_like(expected, torch.nan)  # its memory is free again, and most likely taken for the result
    try:
        found = at_once(*given)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return f"it says: {(str(error).splitlines() or ['nothing'])[0]}"
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return f"it gives {list(found.shape)} in {found.dtype}"
    off = float(found.sub(expected).abs_().max())
    right = off <= tolerance(weight.dtype) * largest  # not if it is NaN
    return None if right else f"a result is off by {off:.2g}, of numbers up to {largest:.2g}"


def tolerance(dtype: torch.dtype) -> float:
    """How far two results may differ, as a part of the largest number."""
    if dtype in IN_FULL and not (dtype is torch.float32 and convolves_in_tf32()):
        return IN_FULL[dtype]
    # TF32 has as many bits as float16
    return ROUNDINGS * torch.finfo(torch.float16 if dtype is torch.float32 else dtype).eps
