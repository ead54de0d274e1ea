"""Launch a Triton kernel again as it was launched before.

Triton looks at every argument of every launch, to find or compile the kernel for just these: that takes more time
than a small kernel does. So a kernel is asked for once for each kind of launch, and then launched as it is.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING: AbstractContextManager[Any] = nullcontext()
_ready: dict[tuple[Hashable, ...], Any] = {}


def relaunch(
    kernel: Any, programs: int, near: Tensor, kind: tuple[Hashable, ...], given: tuple[Any, ...], **options: Any
) -> None:
    """Launch a kernel with these arguments, on the GPU of a tensor.

    `kind` is all that Triton compiles a kernel by, of what can differ: the dtypes of tensors, numbers other than
    those it is told not to look at, constants, and options. Tensors begin at multiples of 16 bytes, or `kind` says
    which. Code that is compiled launches a kernel as its compiler does, which sees to all that.
    """
    grid = (programs, 1, 1)
    if torch.compiler.is_compiling():
        kernel[grid](*given, **options)
        return
    key = (id(kernel), near.device, kind)
    with on_device_of(near):
        ready = _ready.get(key)
        if ready is not None:
            ready[grid](*given)
        else:
            _ready[key] = kernel[grid](*given, **options)


def starts_even(tensor: Tensor) -> bool:
    """Whether Triton may read it 16 bytes at a time; a part of a tensor can begin anywhere."""
    return torch.compiler.is_compiling() or tensor.data_ptr() % 16 == 0


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current GPU, which need not be that of a tensor."""
    return torch.cuda.device(x.device) if x.is_cuda and torch.cuda.device_count() > 1 else _NOTHING
