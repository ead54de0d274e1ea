"""Launch a Triton kernel again as it was launched before.

Triton looks at every argument of every launch, to find or compile the kernel for just these: that takes more time
than a small kernel does. So a kernel is asked for once for each kind of launch, and then launched as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NOTHING: AbstractContextManager[Any] = nullcontext()
_ready: dict[tuple[Hashable, ...], Any] = {}


class Launch(NamedTuple):
    """A launch that was made, but for its tensors."""

    kernel: Any
    grid: tuple[int, int, int]
    device: torch.device
    ready: Any  # the compiled kernel; in Triton's interpreter there is none
    numbers: tuple[Any, ...]
    options: dict[str, Any]

    def again(self) -> Callable[..., None]:
        """What makes it with other tensors of the same kind, and asks nothing.

        It gives addresses instead of tensors, of which Triton would ask the driver where each lies.
        """
        device, numbers = self.device, self.numbers
        if self.ready is None:
            interpreted = partial(self.kernel[self.grid], **self.options)
            return lambda *tensors: interpreted(*tensors, *numbers)
        run = self.ready[self.grid]
        if on_device(device) is _NOTHING:
            return lambda *tensors: run(*[x.data_ptr() for x in tensors], *numbers)

        def there(*tensors: Tensor) -> None:
            with on_device(device):
                run(*[x.data_ptr() for x in tensors], *numbers)

        return there


def relaunch(
    kernel: Any,
    programs: int,
    near: Tensor,
    kind: tuple[Hashable, ...],
    given: tuple[Any, ...],
    numbers: tuple[Any, ...] = (),
    **options: Any,
) -> Launch | None:
    """Launch a kernel with these arguments, and these numbers after them, on the GPU of a tensor.

    `kind` is all that Triton compiles a kernel by, of what can differ: the dtypes of tensors, numbers other than
    those it is told not to look at, constants, and options. Tensors begin at multiples of 16 bytes, or `kind` says
    which. Code that is compiled launches a kernel as its compiler does, which sees to all that; there is no Launch
    then.
    """
    grid, given = (programs, 1, 1), (*given, *numbers)
    if torch.compiler.is_compiling():
        kernel[grid](*given, **options)
        return None
    device = near.device
    key = (id(kernel), device, kind)
    with on_device(device):
        ready = _ready.get(key)
        if ready is not None:
            ready[grid](*given)
        else:
            ready = _ready[key] = kernel[grid](*given, **options)
    return Launch(kernel, grid, device, ready, numbers, options)


def starts_even(tensor: Tensor) -> bool:
    """Whether Triton may read it 16 bytes at a time; a part of a tensor can begin anywhere."""
    return torch.compiler.is_compiling() or tensor.data_ptr() % 16 == 0


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current GPU, which need not be that of a tensor."""
    return torch.cuda.device(device) if device.type == "cuda" and torch.cuda.device_count() > 1 else _NOTHING
