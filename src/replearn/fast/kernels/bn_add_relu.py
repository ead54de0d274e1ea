"""A BatchNorm in train mode with what comes after it, as one torch operation.

    y = relu(gamma (x - mean) / sigma + beta)            in the middle of a block
    y = relu(gamma (x - mean) / sigma + beta + u)        at its end

For the second torch makes eight passes over tensors of this size forwards, and nine backwards; our kernels make
four and seven.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.module import _has_any_global_hook

from ...operators.functional import register
from ..graphs.capture import is_recording
from ..graphs.launch_cache import starts_even
from ..train.class_patching import plain_copies
from ._transforms import transformed
from ._triton.running_statistics import Running
from .conv3x3_small import kernels_run_on

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LAST = torch.channels_last
_arrivals: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


class FusedBatchNorm2d(nn.BatchNorm2d):
    """A BatchNorm as it is seen inside `fused_norms`; outside there are none."""

    __reduce_ex__ = plain_copies(nn.BatchNorm2d)


@register("norm_add_act")
def fused_norm(
    x: Tensor, norm: nn.Module, activation: Callable[[Tensor], Tensor], u: Tensor | None = None
) -> Tensor | None:
    """activation(norm(x) + u) inside `fused_norms`, where our kernels apply; None elsewhere."""
    if type(norm) is FusedBatchNorm2d and is_relu(activation) and fits(x, norm, u):
        twins = is_recording()
        given = (x, norm.weight, norm.bias, None if u is None else twin_of(u), norm, twins)
        return with_twin(_Normed.apply(*given), twins)  # type: ignore[no-untyped-call]
    return None


def with_twin(made: Any, twins: bool) -> Tensor:
    """What a function gave; where that has a twin, it is kept beside it."""
    y: Tensor
    y, twin = made if twins else (made, None)
    if twin is not None:
        y._twin = twin  # type: ignore[attr-defined]
    return y


def twin_of(u: Tensor) -> Tensor:
    """What stands for u where it goes around a block: the same memory, with a gradient of its own.

    The gradient of what goes into a block and around it is a sum, for which autograd makes a pass of its own. The
    kernel that reads it can add, if it gets both parts. Somebody who looks at u's own gradient would then see one
    of them, so this is for steps that are recorded, where nobody does.
    """
    twin: Tensor | None = getattr(u, "_twin", None)
    if twin is None or u.grad_fn is None or u.grad_fn is not twin.grad_fn:  # it was written to since
        return u
    return u if u._backward_hooks or u.retains_grad else twin


def is_relu(activation: Any) -> bool:
    """Whether it is a ReLU that nobody listens to."""
    return activation is F.relu or (type(activation) is nn.ReLU and is_itself(activation))


def fits(x: Tensor, norm: nn.BatchNorm2d, u: Tensor | None) -> bool:
    """Whether our kernels compute this, here and now. Asked at every call, so it is written to be fast."""
    return (
        norm.training
        and fits_alone(x)
        and x.shape[1] == norm.num_features
        and x.shape[1] < x.numel()  # of one pixel there is no variance: the norm itself says so
        and is_usual(norm)
        and is_itself(norm)
        and norm.weight.get_device() == x.get_device()
        and (u is None or fits_beside(u, x))
    )


def nobody_listens() -> bool:
    """Whether nobody takes the computation apart, or hears of every module that is called."""
    return (
        not torch.compiler.is_compiling()
        and not transformed()
        and not _has_any_global_hook()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
    )


def fits_alone(x: Tensor) -> bool:
    return (
        type(x) is Tensor
        and x.dtype in _DTYPES
        and x.dim() == 4
        and x.shape[1] % 16 == 0
        and 0 < x.numel() < 2**31  # offsets are 32-bit numbers in the kernels
        and x.is_contiguous(memory_format=_LAST)
        and kernels_run_on(x.device)
        and starts_even(x)
        and nobody_listens()
    )


def fits_beside(u: Tensor, x: Tensor) -> bool:
    return (
        type(u) is Tensor
        and u.dtype is x.dtype
        and u.shape == x.shape
        and u.device == x.device
        and u.is_contiguous(memory_format=_LAST)
        and starts_even(u)
    )


def is_usual(norm: nn.BatchNorm2d) -> bool:
    """Whether it is affine in float32, with running statistics that move by a fixed share, or with none."""
    return is_row(norm, norm.weight) and is_row(norm, norm.bias) and moves_as_usual(norm)


def is_row(norm: nn.BatchNorm2d, tensor: Tensor | None) -> bool:
    """Whether there is a number in float32 for each channel, one after another."""
    if tensor is None or tensor.dtype is not torch.float32:
        return False
    return tensor.numel() == norm.num_features and tensor.is_contiguous()


def moves_as_usual(norm: nn.BatchNorm2d) -> bool:
    """Whether its running statistics, if there are any, are in float32 and move by a fixed share."""
    mean, variance, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if mean is None or variance is None or not norm.track_running_stats:
        return mean is None and variance is None
    if norm.momentum is None or not is_row(norm, mean) or not is_row(norm, variance):
        return False
    # without a count torch moves them all the same, unless by nothing, as where a layer is recomputed
    return norm.momentum == 0 if batches is None else batches.dtype is torch.int64


def is_itself(module: nn.Module) -> bool:
    """Whether it computes what its class says, and nobody hears of it."""
    return "forward" not in vars(module) and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class _Normed(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, u: Tensor | None, norm: nn.BatchNorm2d, twins: bool
    ) -> Any:
        by, arrivals = kernels(), arrivals_of(norm, x.device)
        numbers = torch.empty((4, x.shape[1]), dtype=torch.float32, device=x.device)
        by.launch_statistics(x, (gamma, beta), Running.of(norm, x), arrivals, numbers, float(norm.eps))
        y = torch.empty_like(x)
        by.launch_apply(x, u, numbers, y)
        ctx.save_for_backward(x, numbers, None if u is None else y)
        ctx.arrivals = arrivals
        ctx.set_materialize_grads(False)
        return (y, y.detach()) if twins else y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [ready(grad, _LAST) for grad in grads if grad is not None]
        if not given:
            return (None,) * 6
        by = kernels()
        x, numbers, y = ctx.saved_tensors
        if y is None and len(given) == 2:  # behind a stem: its kernels take one
            given = [given[0] + given[1]]
        grad, other = given[0], given[1] if len(given) == 2 else None
        passed = None if y is None else torch.empty_like(x)
        slopes = torch.empty((2, x.shape[1]), dtype=torch.float32, device=x.device)
        factors = by.launch_slopes(grad, other, x, y, numbers, passed, slopes, ctx.arrivals)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = torch.empty_like(x)
            by.launch_gradient(grad if passed is None else passed, x, numbers, factors, d_x, passed=y is not None)
        d_gamma, d_beta = slopes.unbind()
        return d_x, d_gamma, d_beta, passed, None, None


def ready(grad: Tensor, order: torch.memory_format = torch.contiguous_format) -> Tensor:
    """A gradient in the order of what it is of, and where kernels read 16 bytes at a time."""
    grad = grad.contiguous(memory_format=order)
    return grad if starts_even(grad) else grad.clone()


def arrivals_of(norm: Any, device: torch.device) -> Tensor:
    """A number for each block of channels, zero between launches: how many of its programs have come."""
    found, count = _arrivals.get(norm), norm.num_features // 16 + 1  # as many as there can be
    if found is None or found.device != device or found.numel() < count:
        found = _arrivals[norm] = torch.zeros(count, dtype=torch.int32, device=device)
    return found


@cache
def kernels() -> Any:
    """The module with the kernels; Triton need not be there where it is not used."""
    from ._triton import bn_add_relu as module

    return module
