"""When kernels may be launched: device, autocast, tracing and autograd checks that all kernels share."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

HALF = (torch.bfloat16, torch.float16)
HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton runs kernels on a CPU, for tests


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
    kind = "cuda" if x.is_cuda else x.device.type  # faster than asking for the type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def span(tensor: Tensor) -> int:
    """The offset of a tensor's last element, for strided views more than it holds."""
    return sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def aligned(*tensors: Tensor | None) -> Any:
    """The tensors, cloned where their memory does not start at a multiple of 16 bytes."""
    return [tensor if tensor is None or tensor.data_ptr() % 16 == 0 else tensor.clone() for tensor in tensors]
