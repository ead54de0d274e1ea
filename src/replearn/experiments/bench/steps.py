"""Training steps on fixed random batches: one candidate on one backend, ready to be timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...costs.precision import float32_products
from ...errors import ReplearnError
from ...fast.graphs.capture import take_workspaces
from ...fast.train.attention_short import short_attention
from ...fast.train.bn_add_relu import fused_norms
from ...fast.train.conv3x3_small import narrow_convolutions
from ...fast.train.overlapped_wgrad import late_weight_gradients
from ..training.compiling import many_graphs
from ..training.optimizers import make_optimizer
from ..training.run import to_channels_last_
from ..training.step import CapturedStep
from .cases import Candidate, Case

Backend = Literal["tf32", "bf16", "captured", "compiled"]
ABOUT = {
    "tf32": "float32 with TF32 products, eager",
    "bf16": "bfloat16 autocast, channels_last, eager, all weights cast in one launch",
    "captured": "bfloat16 autocast, channels_last, our kernels for narrow convolutions, short attention and norms "
    "fused with ReLUs, convolutions' weight gradients beside the rest, the step as a CUDA graph",
    "compiled": "as captured, with torch.compile, which fuses norms itself, and all on one stream",
}
WARM_UP = 3


class TrainingStep:
    """One candidate's model, optimizer and batch. Calling it takes a step; `memory` is the most it needed.

    `narrow=False` leaves narrow convolutions to cuDNN on every backend, `short=False` attention to torch,
    `cast=False` the weights to autocast, layer by layer, `fused=False` norms and ReLUs to torch, and `late=False`
    computes everything on one stream.
    """

    def __init__(
        self,
        case: Case,
        candidate: Candidate,
        backend: Backend,
        device: torch.device,
        *,
        narrow: bool = True,
        short: bool = True,
        cast: bool = True,
        fused: bool = True,
        late: bool = True,
    ) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            take_workspaces(device)
        before = torch.cuda.memory_allocated(device) if self.on_gpu else 0
        torch.manual_seed(0)
        self.backend, self.device = backend, device
        fast = backend in ("captured", "compiled")
        self.narrow, self.short = narrow and fast, short and fast
        self.fused, self.late = (wanted and backend == "captured" for wanted in (fused, late))
        self.model = candidate.build().to(device).train()
        self.channels_last = backend != "tf32"
        if self.channels_last:
            to_channels_last_(self.model)
        self.around = candidate.around(self.model, cast and backend == "bf16")
        if backend == "compiled":
            self.model.compile()
        self.optimizer = make_optimizer(self.model, case.optimizer, device)
        shape = (case.batch_size, 3, case.size, case.size)
        format = torch.channels_last if self.channels_last else torch.contiguous_format
        self.images = torch.randn(shape, device=device).contiguous(memory_format=format)
        self.labels = torch.randint(case.num_classes, (case.batch_size,), device=device)
        self.loss = torch.zeros((), device=device)
        self.parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        for _ in range(WARM_UP):
            self.body()
        self._captured: CapturedStep | None = None
        if self.on_gpu and backend in ("captured", "compiled"):
            self._captured = CapturedStep(self.body, self.model, self.optimizer, [])
            self.memory: int | None = self._captured.peak_memory - before
        else:
            self.memory = self._measure_memory() - before if self.on_gpu else None

    def __call__(self) -> None:
        (self._captured or self.body)()

    def body(self) -> None:
        narrow = narrow_convolutions(self.model) if self.narrow else nullcontext()
        norms = fused_norms(self.model) if self.fused else nullcontext()
        late = late_weight_gradients(self.model) if self.late else nullcontext()
        with narrow, norms, late, short_attention(self.model) if self.short else nullcontext():
            self._body()

    def _body(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        # no cache: a captured step must not keep casts from one replay to the next
        low = torch.autocast(self.device.type, torch.bfloat16, enabled=self.channels_last, cache_enabled=False)
        with low, self.around():
            loss = cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.loss.copy_(loss.detach())
        self.optimizer.step()

    def _measure_memory(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.body()
        return int(torch.cuda.max_memory_allocated(self.device))


@contextmanager
def precision_of(backend: Backend) -> Iterator[None]:
    """TF32 products and autotuned convolutions, as they are used for training, and as they were afterwards."""
    if backend not in get_args(Backend):
        raise ReplearnError(f"There is no backend {backend!r}; there are {', '.join(get_args(Backend))}.")
    with float32_products(tf32=True, benchmark=True), many_graphs() if backend == "compiled" else nullcontext():
        yield


def losses(step: TrainingStep, count: int) -> Tensor:
    """The losses of the next steps."""
    found = []
    for _ in range(count):
        step()
        found.append(step.loss.clone())
    return torch.stack(found)


def flops_of(model: nn.Module, example: Tensor) -> int:
    """FLOPs of a forward pass on the meta device."""
    from ..training.run import count_flops

    return count_flops(model.to("meta"), example.to("meta"))
