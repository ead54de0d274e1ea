"""What one forward pass launches, calls, computes and moves on a GPU, counted on a fake one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from replearn.costs.fake import converted_copy, example_on_fake_gpu, fake_gpu, on_fake_gpu
from replearn.costs.recorder import bytes_of, flops_of, runs_no_kernel, tensors_in
from replearn.fast.inference import Autocast


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = SimpleNamespace(launches=0, dispatches=0, module_calls=0, flops=0, bytes_moved=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, counts = kwargs or {}, self.counts
        counts.dispatches += func.namespace != "prim"  # asked of fakes alone
        made = func(*args, **kwargs)
        results = tensors_in(made)
        if results and not runs_no_kernel(func):
            # a convolution's bias is a launch of its own where cuDNN does not add it
            biased = func is torch.ops.aten.convolution.default and args[2] is not None
            counts.launches += 1 + biased
            counts.flops += flops_of(func, args, kwargs, made)
            counts.bytes_moved += bytes_of(tensors_in(args, kwargs)) + bytes_of(results) * (3 if biased else 1)
        return made


@torch.no_grad()
def count(model: nn.Module, images: Tensor) -> SimpleNamespace:
    plain, precision = model, "float32"
    if isinstance(model, Autocast):
        plain, precision = model.model, str(model.dtype).removeprefix("torch.")
    with fake_gpu(precision):
        double, given = converted_copy(plain, on_fake_gpu), example_on_fake_gpu(images)
        with Counting() as counting:

            def called(module: nn.Module, args: Any) -> None:
                counting.counts.module_calls += 1

            hook = register_module_forward_pre_hook(called)
            double(given)
            hook.remove()
    return counting.counts
