"""Launch cache: compiled Triton kernels by everything that Triton specializes on.

Triton inspects every argument of every launch to find the compiled kernel, which takes longer than a small kernel
runs. Here a kernel is looked up by a key that the caller knows, and launched without inspection.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING: AbstractContextManager[Any] = nullcontext()
_compiled: dict[tuple[Hashable, ...], Any] = {}


def launch_cached(
    kernel: Any,
    programs: int,
    near: Tensor,
    key: tuple[Hashable, ...],
    tensors: tuple[Any, ...],
    numbers: tuple[Any, ...] = (),
    **options: Any,
) -> None:
    """Launch a kernel with these tensors and numbers on the GPU of the tensor `near`.

    `key` holds all that Triton specializes on and that can differ: dtypes of tensors, numbers that are not marked
    do_not_specialize, constants, and options. Tensors are aligned to 16 bytes, or `key` says which are. In
    compiled code the compiler launches the kernel.
    """
    grid, given = (programs, 1, 1), (*tensors, *numbers)
    if torch.compiler.is_compiling():
        kernel[grid](*given, **options)
        return
    device = near.device
    full_key = (id(kernel), device, key)
    with device_guard(device):
        compiled = _compiled.get(full_key)
        if compiled is not None:
            compiled[grid](*given)
        else:
            _compiled[full_key] = kernel[grid](*given, **options)


def is_aligned(tensor: Tensor) -> bool:
    """True if the tensor's memory starts at a multiple of 16 bytes, as a view's may not."""
    return torch.compiler.is_compiling() or tensor.data_ptr() % 16 == 0


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Makes the device current: Triton launches on the current GPU."""
    return torch.cuda.device(device) if device.type == "cuda" and torch.cuda.device_count() > 1 else _NOTHING
