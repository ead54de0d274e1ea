"""BatchNorm in train mode with the residual sum and the ReLU after it.

    y = relu(gamma (x - mean) / sigma + beta)            inside a block
    y = relu(gamma (x - mean) / sigma + beta + u)        at its end

For the second torch makes eight passes over tensors of this size forward and nine backward; the kernels make four
and seven.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.module import _has_any_global_hook

from ...operators.functional import norm_add_act, register
from ..graphs.capture import is_capturing_here
from ..train.class_patching import reduce_as
from ._dispatch import has_memory, is_aligned, runs_eagerly, triton_runs_on

Activation = Callable[[Tensor], Tensor]
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LAST = torch.channels_last
_counters: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


class Running(NamedTuple):
    """Running mean and variance, number of batches, and update factors."""

    tensors: tuple[Tensor, Tensor, Tensor]
    momentum: float
    unbiased: float  # n / (n - 1)

    @classmethod
    def of(cls, norm: nn.BatchNorm2d, x: Tensor) -> Running | None:
        """None if the norm has none, or its layer is being recomputed, which unsets the number of batches."""
        mean, variance, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
        if mean is None or variance is None or batches is None:
            return None
        torch.autograd.graph.increment_version((mean, variance, batches))  # autograd does not see the kernel
        pixels = x.numel() // x.shape[1]
        return cls((mean, variance, batches), float(norm.momentum or 0.0), pixels / max(1, pixels - 1))


class FusedBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d inside `accelerate`."""

    __reduce_ex__ = reduce_as(nn.BatchNorm2d)


@register("norm_add_act")
def bn_add_relu(x: Tensor, norm: nn.Module, activation: Activation, u: Tensor | None = None) -> Tensor | None:
    """activation(norm(x) + u) inside `accelerate` where the kernels apply; None elsewhere."""
    if not fits(x, norm, activation, u):
        return None
    aliased = is_capturing_here()
    given = (x, norm.weight, norm.bias, None if u is None else residual_alias(u), norm, aliased)
    return with_alias(_BatchNormAddReLU.apply(*given), aliased)  # type: ignore[no-untyped-call]


reference = inspect.unwrap(norm_add_act)


def examples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments that the kernels take, for tests."""
    x, u = (torch.randn(3, 32, 5, 7, device=device, dtype=dtype).to(memory_format=_LAST) for _ in range(2))
    for residual in (None, u):
        norm = FusedBatchNorm2d(32, device=device)
        for parameter in norm.parameters():
            nn.init.normal_(parameter, mean=1.0, std=0.2)
        yield x, norm, F.relu, residual


def with_alias(made: Any, aliased: bool) -> Tensor:
    """The output of a function, with its alias as an attribute."""
    y: Tensor
    y, alias = made if aliased else (made, None)
    if alias is not None:
        y._residual_alias = alias  # type: ignore[attr-defined]
    return y


def residual_alias(u: Tensor) -> Tensor:
    """The alias of u for the residual connection: the same memory, with a gradient of its own.

    The gradients of a block's input, through the block and around it, are added by autograd in a pass of its own.
    The kernel that reads the sum can add if it gets both parts. u.grad is then one of them, so this is for
    captured steps, where nothing reads it.
    """
    alias: Tensor | None = getattr(u, "_residual_alias", None)
    if alias is None or u.grad_fn is None or u.grad_fn is not alias.grad_fn:  # it was written to since
        return u
    return u if u._backward_hooks or u.retains_grad else alias


def is_relu(activation: Any) -> bool:
    """True for a ReLU without hooks."""
    return activation is F.relu or (type(activation) is nn.ReLU and is_unmodified(activation))


def fits(x: Tensor, norm: Any, activation: Activation, u: Tensor | None = None) -> bool:
    """True if the kernels compute this call. Checked at every call, cheap conditions first."""
    return (
        type(norm) is FusedBatchNorm2d
        and is_relu(activation)
        and norm.training
        and is_kernel_input(x)
        and x.shape[1] == norm.num_features
        and x.shape[1] < x.numel()  # torch raises for a single pixel, which has no variance
        and is_row(norm, norm.weight)
        and is_row(norm, norm.bias)
        and has_momentum_state(norm)
        and is_unmodified(norm)
        and norm.weight.get_device() == x.get_device()
        and (u is None or ((u.dtype, u.shape, u.device) == (x.dtype, x.shape, x.device) and is_dense(u)))
    )


def is_unobserved() -> bool:
    """True unless the call is compiled, traced or transformed, or global hooks or modes would see it."""
    return runs_eagerly() and not _has_any_global_hook() and not torch._C._len_torch_dispatch_stack()


def is_kernel_input(x: Tensor) -> bool:
    return (
        x.dtype in _DTYPES
        and x.dim() == 4
        and x.shape[1] % 16 == 0
        and 0 < x.numel() < 2**31  # the kernels have 32-bit offsets
        and is_dense(x)
        and triton_runs_on(x.device)
        and is_unobserved()
    )


def is_dense(x: Tensor) -> bool:
    return type(x) is Tensor and x.is_contiguous(memory_format=_LAST) and is_aligned(x)


def is_row(norm: nn.BatchNorm2d, tensor: Tensor | None) -> bool:
    """True for a contiguous float32 tensor with one value for each channel."""
    if tensor is None or tensor.dtype is not torch.float32:
        return False
    return tensor.numel() == norm.num_features and tensor.is_contiguous()


def has_momentum_state(norm: nn.BatchNorm2d) -> bool:
    """True if its running statistics, if any, are in float32 and move by a momentum."""
    mean, variance, batches = norm.running_mean, norm.running_var, norm.num_batches_tracked
    if mean is None or variance is None or not norm.track_running_stats:
        return mean is None and variance is None
    if norm.momentum is None or not is_row(norm, mean) or not is_row(norm, variance):
        return False
    # without a counter torch moves them all the same, unless the momentum is 0, as in recomputation
    return norm.momentum == 0 if batches is None else batches.dtype is torch.int64


def is_unmodified(module: nn.Module) -> bool:
    """True if it has its class's forward and no hooks."""
    return "forward" not in vars(module) and not has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class _BatchNormAddReLU(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, beta: Tensor, u: Tensor | None, norm: nn.BatchNorm2d, aliased: bool
    ) -> Any:
        by, counters = kernels(), counters_of(norm, x.device)
        numbers = torch.empty((4, x.shape[1]), dtype=torch.float32, device=x.device)
        by.launch_statistics(x, (gamma, beta), Running.of(norm, x), counters, numbers, float(norm.eps))
        y = torch.empty_like(x)
        by.launch_apply(x, u, numbers, y)
        ctx.save_for_backward(x, numbers, None if u is None else y)
        ctx.counters = counters
        ctx.set_materialize_grads(False)
        return (y, y.detach()) if aliased else y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [aligned_grad(grad, _LAST) for grad in grads if grad is not None]
        if not given:
            return (None,) * 6
        by = kernels()
        x, numbers, y = ctx.saved_tensors
        if y is None and len(given) == 2:  # without a residual the kernels take one gradient
            given = [given[0] + given[1]]
        grad, other = given[0], given[1] if len(given) == 2 else None
        passed = None if y is None else torch.empty_like(x)
        slopes = torch.empty((2, x.shape[1]), dtype=torch.float32, device=x.device)
        factors = by.launch_affine_grads(grad, other, x, y, numbers, passed, slopes, ctx.counters)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = torch.empty_like(x)
            by.launch_input_grad(
                grad if passed is None else passed, x, numbers, factors, d_x, passed=y is not None
            )
        d_gamma, d_beta = slopes.unbind()
        return d_x, d_gamma, d_beta, passed, None, None


def aligned_grad(grad: Tensor, order: torch.memory_format = torch.contiguous_format) -> Tensor:
    """A gradient in the memory format of its tensor, aligned to 16 bytes."""
    grad = grad.contiguous(memory_format=order)
    return grad if not has_memory(grad) or is_aligned(grad) else grad.clone()


def counters_of(norm: Any, device: torch.device) -> Tensor:
    """A counter for each block of channels, zero between launches: how many of its programs are done."""
    found, count = _counters.get(norm), norm.num_features // 16 + 1  # as many as there can be
    if found is None or found.device != device or found.numel() < count:
        found = _counters[norm] = torch.zeros(count, dtype=torch.int32, device=device)
    return found


@cache
def kernels() -> Any:
    """Imported on first use: Triton is optional."""
    from ._triton import bn_add_relu as module

    return module
