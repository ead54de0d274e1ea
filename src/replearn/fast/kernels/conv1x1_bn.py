"""BatchNorm behind a 1x1 convolution that widens, without the wide tensor between them.

    y = W h,   mean(y) = W mean(h),   var(y) = diag(W cov(h) W^T)

The statistics of the wide output follow from the narrow input, and the norm is folded into the kernel before the
product: the output is written once, and neither read for its statistics nor saved for backward. With g the
gradient of y, s = gamma / sigma, and sums over the P pixels of g and g h^T, all that backward needs is narrow:

    dh = (s W)^T g - W^T diag(k) W h + W^T (k mean(y) - s sum(g) / P),   k = s dgamma / (sigma P)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ...operators._base.layers import Activation, Convolution
from ...operators.functional import register
from ..synthesis.launch_cost import pays
from ._dispatch import HALF, in_transform, launches, on_gpu
from ._launch_cache import is_aligned


@register("conv_norm_add_act")
def conv1x1_bn(
    z: Tensor, conv: Convolution, kernel: Tensor, norm: nn.Module, activation: Activation, x: Tensor
) -> Tensor | None:
    """activation(x + norm(kernel * z)), with the norm in the kernel where that is the same; None elsewhere.

    Inside `accelerate` the norm is fused with the sum and the activation instead: less time, and more memory.
    """
    fitting = fits(z, conv, kernel, norm, activation, x)
    return activation(x + expand_and_normalize(z, kernel, norm)) if fitting else None


def reference(
    z: Tensor, conv: Convolution, kernel: Tensor, norm: nn.Module, activation: Activation, x: Tensor
) -> Tensor:
    return activation(x + norm(conv(z, kernel)))


def examples(device: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Arguments that the kernels take where launches are free, for tests."""
    for narrow, wide in ((8, 32), (64, 128)):
        conv = Convolution(nn.Conv2d(narrow, wide, 1, bias=False), torch.device(device))
        kernel = torch.randn(wide, narrow, 1, 1, device=device, dtype=dtype) * narrow**-0.5
        z, x = (torch.randn(4, width, 3, 2, device=device, dtype=dtype) for width in (narrow, wide))
        z, x = (tensor.to(memory_format=torch.channels_last) for tensor in (z, x))
        yield z, conv, kernel, nn.BatchNorm2d(wide, device=device), torch.relu, x


def expand_and_normalize(z: Tensor, kernel: Tensor, norm: Any) -> Tensor:
    """norm(kernel * z) of a BatchNorm in train mode; its updates running statistics."""
    kind = z.device.type
    pixels = z.movedim(1, -1)
    flat, weight = pixels.reshape(-1, z.shape[1]), kernel.flatten(1)
    if torch.is_autocast_enabled(kind):
        flat = flat.to(torch.get_autocast_dtype(kind))
    with torch.autocast(kind, enabled=False):
        out, mean, variance = _Expansion.apply(flat, weight, norm.weight, norm.bias, norm.eps)  # type: ignore[no-untyped-call]
    update_running_stats(norm, mean, variance, len(flat))
    made: Tensor = out.view(*pixels.shape[:-1], -1).movedim(-1, 1)
    return made


def fits(
    z: Tensor, layer: Convolution, kernel: Tensor, norm: nn.Module, activation: Activation, x: Tensor
) -> bool:
    """True on a GPU in train mode and channels_last, for a widening convolution where it pays."""
    conv = layer.shell
    return (
        on_gpu(z.device)
        and type(norm) is nn.BatchNorm2d
        and norm.training
        and type(conv) is nn.Conv2d
        and conv.kernel_size == (1, 1)
        and (conv.stride, conv.padding, conv.groups) == ((1, 1), (0, 0), 1)
        and 2 * conv.in_channels <= conv.out_channels
        and z.is_contiguous(memory_format=torch.channels_last)
        and z.numel() > z.shape[1]  # torch raises for a single pixel, which has no variance
        and not in_transform()
        and pays(z.numel() // conv.in_channels * conv.out_channels)
    )


@torch.no_grad()
def update_running_stats(norm: Any, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update a BatchNorm's running statistics as its forward does."""
    if norm.running_mean is None or not norm.track_running_stats:
        return
    if norm.num_batches_tracked is not None:  # None while an operator is recomputed, with a momentum of zero
        norm.num_batches_tracked.add_(1)
    momentum = norm.momentum if norm.momentum is not None else 1.0 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
    norm.running_var.lerp_((variance * (count / (count - 1))).to(norm.running_var.dtype), momentum)


class _Expansion(Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        high = torch.promote_types(h.dtype, torch.float32)
        wide = weight.to(high)
        centre = h.mean(0, dtype=high)
        spread = weighted_covariance(h, wide, centre)
        fold_norm = kernels().fold_norm if uses_kernels(wide) else fold_norm_reference
        scaled, shift, numbers = fold_norm(wide, spread, centre, gamma, beta, eps, h.dtype)
        ctx.save_for_backward(h, wide, scaled, centre, spread, numbers)
        mean, variance = numbers[0], numbers[1]
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        ctx.dtypes = weight.dtype, None if gamma is None else gamma.dtype, None if beta is None else beta.dtype
        return torch.addmm(shift, h, scaled.mT), mean, variance

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:
            return (None,) * 5
        with torch.autocast(grads[0].device.type, enabled=False):
            return _Expansion.gradients(ctx, grads[0])

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h, wide, scaled, centre, spread, numbers = ctx.saved_tensors
        needs_h, needs_weight = ctx.needs_input_grad[:2]
        d_beta = grad.sum(0, dtype=wide.dtype)
        outer = product(grad.mT, h)  # sum of g h^T over the pixels
        own, of_gamma, of_beta = ctx.dtypes
        d_gamma, turned, offsets, d_weight = norm_grads(wide, outer, d_beta, numbers, len(h), centre, spread, own)
        return (
            input_grad(h, grad, scaled, wide, turned, offsets) if needs_h else None,
            d_weight if needs_weight else None,
            None if of_gamma is None else d_gamma.to(of_gamma),
            None if of_beta is None else d_beta.to(of_beta),
            None,
        )


def weighted_covariance(h: Tensor, weight: Tensor, centre: Tensor) -> Tensor:
    """W cov(h), centre being the mean of h."""
    return weight @ torch.addr(product(h.mT, h), centre, centre, beta=1 / len(h), alpha=-1)


def norm_grads(weight: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `norm_grads_reference`, by the kernel where there is one."""
    found: tuple[Tensor, Tensor, Tensor, Tensor]
    found = (kernels().norm_grads if uses_kernels(weight) else norm_grads_reference)(weight, *given)
    return found


def input_grad(
    h: Tensor, grad: Tensor, scaled: Tensor, weight: Tensor, turned: Tensor, offsets: Tensor, *,
    masked: bool = False,
) -> Tensor:  # fmt: skip
    """The gradient of h from that of the wide output; `masked`, of what went into the ReLU that h comes from."""
    row, along = (offsets @ weight).to(h.dtype), (weight.mT @ turned).to(h.dtype)
    if has_input_grad_kernel(h, grad, scaled):
        made = torch.empty_like(h)
        reduce_kernels().launch(grad, h, scaled, along, row, made, masked=masked)
        return made
    made = torch.addmm(torch.addmm(row, h, along), grad, scaled)
    return torch.ops.aten.threshold_backward(made, h, 0) if masked else made


def has_input_grad_kernel(h: Tensor, grad: Tensor, scaled: Tensor) -> bool:
    """True if the kernel takes these sizes and dtypes, and all tensors are aligned."""
    return (
        launches(h)
        and h.dtype in HALF
        and not torch.compiler.is_compiling()
        and reduce_kernels().can_tile(*scaled.shape)
        and grad.numel() < 2**31
        and all(tensor.is_contiguous() and is_aligned(tensor) for tensor in (h, grad, scaled))
    )


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


def uses_kernels(tensor: Tensor) -> bool:
    """True where a Triton kernel replaces a dozen launches; a compiler fuses those itself."""
    return launches(tensor) and tensor.dtype is torch.float32 and not torch.compiler.is_compiling()


def kernels() -> Any:
    """Imported on first use: Triton is optional."""
    from ._triton import conv1x1_bn_expand as expanding

    return expanding


def reduce_kernels() -> Any:
    from ._triton import conv1x1_bn_reduce as module

    return module


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with sums that are kept in float32 at least."""
    if a.dtype not in HALF:
        return a @ b
    if not a.is_cuda:
        return a.float() @ b.float()
    return _wide_product(a, b) if torch.compiler.is_compiling() else torch.mm(a, b, out_dtype=torch.float32)


@torch.library.custom_op("replearn::wide_product", mutates_args=())
def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """As an opaque operation for torch.compile."""
    return torch.mm(a, b, out_dtype=torch.float32)


@_wide_product.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)
