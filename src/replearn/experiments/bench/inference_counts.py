"""What one forward pass of each side launches, calls, computes and moves on a GPU, counted without one.

A speedup can't be larger than the ratio of what takes the time: launches, dispatches and module calls at batch 1,
arithmetic or bytes at large batches. The counts are read off the model's double on a fake GPU, one image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ...costs.fake import double_of, example_on_fake_gpu, fake_gpu, on_fake_gpu
from ...costs.recorder import bytes_of, flops_of, runs_no_kernel, tensors_in
from ...fast.graphs.replay import Replayed
from ...fast.inference import Autocast
from .inference_sides import DEPLOYED, E2E, Sides


@dataclass(kw_only=True)
class Counts:
    """One forward pass; a convolution's bias is a launch of its own on CUDA, where cuDNN does not add it."""

    launches: int = 0
    dispatches: int = 0  # views too: what Python's time follows in a flat graph
    module_calls: int = 0
    flops: int = 0
    bytes_moved: int = 0


def counted(sides: Sides, size: int, *, merge: bool, flatten: bool) -> dict[str, dict[str, dict[str, int]]]:
    """The counts of E2E and of deployed RepL, in float32 and under autocast."""
    images = torch.randn(1, 3, size, size, device=next(sides.end_to_end.parameters()).device)
    found: dict[str, dict[str, dict[str, int]]] = {}
    for backend in ("fp32", "amp"):
        built = sides.built(backend, (E2E, DEPLOYED), images, merge=merge, flatten=flatten)
        found[backend] = {kind: asdict(count(side, images)) for kind, side in built.items()}
    return found


@torch.no_grad()
def count(model: nn.Module, images: Tensor) -> Counts:
    """Run the model's double on a fake GPU and count; its weights are not read."""
    if isinstance(model, Replayed):
        model = model.model
    plain: nn.Module = model.model if isinstance(model, Autocast) else model
    precision = str(model.dtype).removeprefix("torch.") if isinstance(model, Autocast) else "float32"
    with fake_gpu(precision):
        double, given = double_of(plain, on_fake_gpu), example_on_fake_gpu(images)
        with Counting() as counting:
            double(given)
    return counting.counts


class Counting(TorchDispatchMode):
    """Counts kernels as they are dispatched, and modules as they are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counts()

    def __enter__(self) -> Counting:
        self._hook = register_module_forward_pre_hook(self._called)
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        self._hook.remove()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def _called(self, module: nn.Module, args: Any) -> None:
        self.counts.module_calls += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.counts.dispatches += func.namespace != "prim"  # asked of fakes alone
        made = func(*args, **kwargs)
        results = tensors_in(made)
        if results and not runs_no_kernel(func):
            biased = func is torch.ops.aten.convolution.default and args[2] is not None
            self.counts.launches += 1 + biased
            self.counts.flops += flops_of(func, args, kwargs, made)
            moved = bytes_of(results)
            self.counts.bytes_moved += bytes_of(tensors_in(args, kwargs)) + moved * (3 if biased else 1)
        return made
