"""A reduced bottleneck as one operation: two 1x1 convolutions, the norm, the sum and both ReLUs.

    z = relu(W1 x),   y = relu(x + norm(W z)),   mean(W z) = W mean(z),   var(W z) = diag(W cov(z) W^T)

The norm's statistics follow from z, and the norm is folded into W before the product, so that W z is neither kept
nor read again. Most of the time goes into moving wide tensors: torch reads or writes one 22 times, forward and
backward, and this 11 times. With g the gradient of W z, s = gamma / sigma, and sums over the P pixels of g and
g z^T, all that backward needs is narrow:

    dz = (s W)^T g - W^T diag(k) W z + W^T (k mean(W z) - s sum(g) / P),   k = s dgamma / (sigma P)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ...operators import functional
from ...operators._base.layers import Activation, Convolution
from ..graphs.capture import is_capturing_here
from ._dispatch import HALF, compute_dtype, has_memory, in_transform, is_aligned, launches, on_gpu
from .bn_add_relu import (
    FusedBatchNorm2d,
    Running,
    aligned_grad,
    counters_of,
    has_momentum_state,
    is_unmodified,
    is_unobserved,
    with_alias,
)
from .bn_add_relu import kernels as norm_kernels

MIN_SIZE = 2**25  # elements of x from which on moving it less often outweighs the launches of an eager step
Pair = tuple[Convolution, Tensor]  # a layer and its kernel
_LAST = torch.channels_last
reference = inspect.unwrap(functional.reduced_bottleneck)


@functional.register("reduced_bottleneck")
def reduced_bottleneck(
    x: Tensor, reduction: Pair, expansion: Pair, norm: nn.Module, activation: Activation
) -> Tensor | None:
    """The operator as one operation where that pays; None elsewhere."""
    fitting = fits(x, reduction, expansion, norm, activation)
    return run_fused(x, reduction[1], expansion[1], norm) if fitting else None


def examples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments that the kernels take where launches are free, for tests."""
    for inner, width in ((16, 32), (64, 128)):
        pairs = []
        for into, out in ((width, inner), (inner, width)):
            conv = Convolution(nn.Conv2d(into, out, 1, bias=False), torch.device(device))
            pairs.append((conv, torch.randn(out, into, 1, 1, device=device, dtype=dtype) * into**-0.5))
        x = torch.randn(4, width, 3, 2, device=device, dtype=dtype).to(memory_format=_LAST)
        yield x, *pairs, nn.BatchNorm2d(width, affine=inner > 16, device=device), F.relu


def run_fused(x: Tensor, reduce: Tensor, expand: Tensor, norm: Any) -> Tensor:
    """relu(x + norm(expand * relu(reduce * x))), of a BatchNorm in train mode; updates running statistics."""
    aliased = is_capturing_here()
    x = x.contiguous(memory_format=_LAST)
    given = (x, reduce.flatten(1), expand.flatten(1), norm.weight, norm.bias, norm, aliased)
    with torch.autocast(x.device.type, enabled=False):
        return with_alias(_ReducedBottleneck.apply(*given), aliased)  # type: ignore[no-untyped-call]


def fits(x: Tensor, reduction: Pair, expansion: Pair, norm: Any, activation: Activation) -> bool:
    """True on a GPU in train mode and channels_last, where the operation is the same and pays."""
    before, after = reduction[0], expansion[0]
    first: Any = before.shell
    second: Any = after.shell
    return (
        on_gpu(x.device)
        and type(norm) in (nn.BatchNorm2d, FusedBatchNorm2d)
        and norm.training
        and has_momentum_state(norm)
        and (activation is F.relu or type(activation) is nn.ReLU)
        and compute_dtype(x) is x.dtype
        and is_pointwise(first)
        and is_pointwise(second)
        and x.shape[1] == first.in_channels == second.out_channels
        and 2 * second.in_channels <= second.out_channels
        and x.is_contiguous(memory_format=_LAST)
        and x.numel() > x.shape[1]  # torch raises for a single pixel, which has no variance
        and (x.numel() >= MIN_SIZE or is_capturing_here())
        and not in_transform()
        # fake tensors are there to be observed, as by a cost prediction
        and (not has_memory(x) or is_unseen(norm, before, after, activation))
    )


def is_unseen(*parts: Any) -> bool:
    """True if no hook, mode or trace would see the layers one by one."""
    return is_unobserved() and all(is_unmodified(part) for part in parts if isinstance(part, nn.Module))


def is_pointwise(conv: Any) -> bool:
    return (
        type(conv) is nn.Conv2d
        and conv.kernel_size == (1, 1)
        and (conv.stride, conv.padding, conv.groups) == ((1, 1), (0, 0), 1)
    )


class _ReducedBottleneck(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, reduce: Tensor, expand: Tensor, gamma: Tensor | None, beta: Tensor | None, norm: Any,
        aliased: bool,
    ) -> Any:  # fmt: skip
        rows = rows_of(x)
        z = torch.mm(rows, reduce.mT)
        z, sums = relu_grad_and_sum(z, z, norm)  # which is relu(z)
        centre, wide = sums / len(z), expand.to(sums.dtype)
        spread = wide @ torch.addr(product(z.mT, z), centre, centre, beta=1 / len(z), alpha=-1)  # W cov(z)
        scaled, shift, numbers = fold_norm_into(wide, spread, centre, norm, z)
        y = torch.empty_like(x, memory_format=_LAST)  # not a view: callers may write to it
        add_relu_(rows_of(y), rows, z, scaled, shift)
        ctx.save_for_backward(x, z, y, reduce, scaled, wide, centre, spread, numbers)
        ctx.set_materialize_grads(False)
        ctx.norm = norm
        ctx.dtypes = expand.dtype, None if gamma is None else gamma.dtype, None if beta is None else beta.dtype
        return (y, y.detach()) if aliased else y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [rows_of(aligned_grad(grad, _LAST)) for grad in grads if grad is not None]
        if not given:
            return (None,) * 7
        with torch.autocast(given[0].device.type, enabled=False):
            return _ReducedBottleneck.gradients(ctx, *given)

    @staticmethod
    def gradients(ctx: Any, grad: Tensor, other: Tensor | None = None) -> tuple[Tensor | None, ...]:
        x, z, y, reduce, scaled, wide, centre, spread, numbers = ctx.saved_tensors
        own, of_gamma, of_beta = ctx.dtypes
        needs_x, needs_reduce, needs_expand = ctx.needs_input_grad[:3]
        passed, d_beta = relu_grad_and_sum(grad, rows_of(y), ctx.norm, other)
        outer = product(passed.mT, z)  # sum of g z^T over the pixels
        grads_of_norm = kernels().norm_grads if uses_kernels(wide) else norm_grads_reference
        given = (wide, outer, d_beta, numbers, len(z), centre, spread, own)
        d_gamma, turned, offsets, d_expand = grads_of_norm(*given)
        d_reduce = None
        if needs_x or needs_reduce:
            d_z = input_grad(z, passed, scaled, wide, turned, offsets)
            d_reduce = product(d_z.mT, rows_of(x)).to(reduce.dtype) if needs_reduce else None
            if needs_x:
                passed.addmm_(d_z, reduce)  # plus the residual's gradient
        return (
            passed.view(x.shape[0], *x.shape[2:], -1).movedim(-1, 1) if needs_x else None,
            d_reduce,
            d_expand if needs_expand else None,
            None if of_gamma is None else d_gamma.to(of_gamma),
            None if of_beta is None else d_beta.to(of_beta),
            None,
            None,
        )


def rows_of(x: Tensor) -> Tensor:
    """A channels_last tensor as a (pixels, channels) view."""
    return x.movedim(1, -1).view(-1, x.shape[1])


def fold_norm_into(
    wide: Tensor, spread: Tensor, centre: Tensor, norm: Any, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`fold_norm_reference`, by a kernel where it applies; updates running statistics."""
    given = (wide, spread, centre, norm.weight, norm.bias, norm.eps, z.dtype)
    made: tuple[Tensor, Tensor, Tensor]
    if uses_kernels(wide):
        made = kernels().fold_norm(*given, Running.of(norm, z))
    else:
        made = fold_norm_reference(*given)
        update_running_stats(norm, made[2][0], made[2][1], len(z))
    return made


@torch.no_grad()
def update_running_stats(norm: Any, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update a BatchNorm's running statistics, if any, as its forward does."""
    if norm.num_batches_tracked is not None:  # None while a block is recomputed, with a momentum of zero
        norm.num_batches_tracked.add_(1)
    if norm.running_mean is not None:
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
        norm.running_var.lerp_((variance * (count / (count - 1))).to(norm.running_var.dtype), norm.momentum)


def fold_norm_reference(
    weight: Tensor, spread: Tensor, centre: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The kernel and the shift with the norm in them; and mean, variance, 1 / sigma and scale of every channel."""
    mean = weight @ centre
    variance = (spread * weight).sum(1).clamp_min(0)  # rounding may make it negative
    inverse = (variance + eps).rsqrt()
    scale = inverse if gamma is None else inverse * gamma.to(weight.dtype)
    shift = -scale * mean if beta is None else torch.addcmul(beta.to(weight.dtype), scale, mean, value=-1)
    return (scale[:, None] * weight).to(dtype), shift.to(dtype), torch.stack([mean, variance, inverse, scale])


def norm_grads_reference(
    weight: Tensor, outer: Tensor, d_beta: Tensor, numbers: Tensor, count: int, centre: Tensor, spread: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of gamma; -diag(k) W; k mean - s sum(g) / P; and the gradient of W in this dtype."""
    mean, _, inverse, scale = numbers
    d_gamma = inverse * torch.addcmul((outer * weight).sum(1), mean, d_beta, value=-1)
    k = scale * inverse * d_gamma / count
    d_weight = scale[:, None] * (outer - d_beta[:, None] * centre - (d_gamma * inverse)[:, None] * spread)
    return d_gamma, -k[:, None] * weight, torch.addcmul(scale * d_beta / -count, k, mean), d_weight.to(dtype)


def input_grad(z: Tensor, grad: Tensor, scaled: Tensor, weight: Tensor, turned: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of what went into the ReLU that z comes from, from that of the wide output."""
    row, along = (offsets @ weight).to(z.dtype), (weight.mT @ turned).to(z.dtype)
    if has_input_grad_kernel(z, grad, scaled):
        made = torch.empty_like(z)
        kernels().launch_input_grad(grad, z, scaled, along, row, made)
        return made
    made = torch.addmm(torch.addmm(row, z, along), grad, scaled)
    masked: Tensor = torch.ops.aten.threshold_backward(made, z, 0)
    return masked


def has_input_grad_kernel(z: Tensor, grad: Tensor, scaled: Tensor) -> bool:
    """True if the kernel takes these sizes and dtypes, and all tensors are aligned."""
    return (
        launches(z)
        and z.dtype in HALF
        and all(size % 64 == 0 for size in scaled.shape)
        and grad.numel() < 2**31
        and all(tensor.is_contiguous() and is_aligned(tensor) for tensor in (z, grad, scaled))
    )


def uses_kernels(tensor: Tensor) -> bool:
    """True where a Triton kernel replaces a dozen launches."""
    return launches(tensor) and tensor.dtype is torch.float32


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with sums that are kept in float32 at least."""
    if a.dtype not in HALF:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def add_relu_(out: Tensor, x: Tensor, z: Tensor, scaled: Tensor, shift: Tensor) -> None:
    """relu(x + z scaled^T + shift) into `out`, in one kernel if it takes these sizes."""
    tiled = scaled.shape[0] % 128 == 0 and scaled.shape[1] % 64 == 0
    if launches(x) and x.dtype in HALF and tiled and x.numel() < 2**31:
        kernels().launch_add_relu(x if is_aligned(x) else x.clone(), z, scaled, shift, out)
    else:
        torch.addmm(shift, z, scaled.mT, out=out).add_(x).relu_()


def relu_grad_and_sum(
    grad: Tensor, y: Tensor, norm: nn.Module, other: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradient before a ReLU with output y, and its sum over pixels; `other` is added to `grad`."""
    high = torch.promote_types(y.dtype, torch.float32)
    if launches(y) and y.dtype is not torch.float64 and y.shape[1] % 16 == 0 and y.numel() < 2**31:
        passed, sums = torch.empty_like(y), torch.empty(y.shape[1], dtype=high, device=y.device)
        norm_kernels().launch_relu_backward(grad, other, y, passed, sums, counters_of(norm, y.device))
        return passed, sums
    passed = torch.ops.aten.threshold_backward(grad if other is None else grad + other, y, 0)
    return passed, passed.sum(0, dtype=high)


@cache
def kernels() -> Any:
    """Imported on first use: Triton is optional."""
    from ._triton import reduced_bottleneck as module

    return module
