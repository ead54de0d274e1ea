"""What all kernels share: device, autocast, tracing and autograd checks, and the registration of operations."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.flop_counter import register_flop_formula

HALF = (torch.bfloat16, torch.float16)
HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs kernels on a CPU, for tests
F = TypeVar("F", bound=Callable[..., Any])
_library = torch.library.Library("replearn", "FRAGMENT")


def register_operation(
    schema: str,
    launch: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    flops: Callable[..., int] | None = None,
) -> Any:
    """Register a custom operation without a gradient, and return it.

    A call takes less time than one of `torch.library.custom_op`. `flops` takes `out_val` as well.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    for device in ("CUDA", "CPU"):
        _library.impl(name, launch, device)
    torch.library.register_fake(f"replearn::{name}", fake, lib=_library)
    packet = getattr(torch.ops.replearn, name)
    if flops is not None:
        register_flop_formula(packet, get_raw=True)(flops)
    return packet.default


def leaf(function: F) -> F:
    """Have fx record calls of a function as one node: a pickled graph is traced again when it is loaded."""

    @wraps(function)
    def call(x: Any, /, *others: Any, **named: Any) -> Any:
        if has_torch_function_unary(x):  # an fx proxy
            return handle_torch_function(call, (x,), x, *others, **named)
        return function(x, *others, **named)

    return call  # type: ignore[return-value]


def on_gpu(device: torch.device) -> bool:
    """True on a GPU, fake ones included, and on the CPU in Triton's interpreter."""
    return device.type == "cuda" or INTERPRETED


def triton_runs_on(device: torch.device) -> bool:
    """True if Triton kernels can be launched on this device."""
    return on_gpu(device) and HAS_TRITON


def has_memory(tensor: Tensor) -> bool:
    """False for fake tensors, which may say that they are on a GPU."""
    return type(tensor).__name__ != "FakeTensor"


def launches(tensor: Tensor) -> bool:
    """True if Triton kernels can be launched on this tensor."""
    return on_gpu(tensor.device) and has_memory(tensor)


def in_transform() -> bool:
    """True inside torch.func transforms and forward-mode AD, which kernels do not support."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def runs_eagerly() -> bool:
    """True unless the call is being traced, compiled, exported or transformed."""
    return not (torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or in_transform())


def needs_grad(*tensors: Tensor | None) -> bool:
    """True if autograd would record an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that a matmul or convolution of x runs in: autocast's, or its own."""
    device = "cuda" if x.is_cuda else x.device.type  # faster than asking for the type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def span(tensor: Tensor) -> int:
    """The offset of a tensor's last element, for strided views more than it holds."""
    return sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def aligned(*tensors: Tensor | None) -> Any:
    """The tensors, cloned where their memory does not start at a multiple of 16 bytes."""
    return [tensor if tensor is None or tensor.data_ptr() % 16 == 0 else tensor.clone() for tensor in tensors]


def is_aligned(tensor: Tensor) -> bool:
    """True if the tensor's memory starts at a multiple of 16 bytes, as a view's may not."""
    return torch.compiler.is_compiling() or tensor.data_ptr() % 16 == 0


def launch(kernel: Any, programs: int | tuple[int, int], near: Tensor, *given: Any, **options: Any) -> None:
    """Launch so many programs of a Triton kernel on the GPU of the tensor `near`."""
    several = near.is_cuda and torch.cuda.device_count() > 1  # Triton launches on the current GPU
    with torch.cuda.device(near.device) if several else nullcontext():
        kernel[programs if isinstance(programs, tuple) else (programs,)](*given, **options)
