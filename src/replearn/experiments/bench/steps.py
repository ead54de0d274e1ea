"""Training steps on fixed random batches: one candidate on one backend, ready to be timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...costs.precision import float32_products
from ...errors import ReplearnError
from ...fast.graphs.capture import take_workspaces
from ..training.optimizers import make_optimizer
from ..training.run import to_channels_last_
from ..training.step import CapturedStep, autocast_for, many_graphs, step_body
from .cases import Candidate, Case

Backend = Literal["tf32", "bf16", "captured", "compiled"]
ABOUT = {
    "tf32": "float32 with TF32 products, eager",
    "bf16": "bfloat16 autocast, channels_last, eager",
    "captured": "bfloat16 autocast, channels_last, the step as a CUDA graph",
    "compiled": "bfloat16 autocast, channels_last, torch.compile, the step as a CUDA graph",
}
WARM_UP = 3


class TrainingStep:
    """One candidate's model, optimizer and batch. Calling it takes a step; `memory` is the most it needed.

    It is the trainer's step, inside `replearn.fast.accelerate` unless `accelerated=False`.
    """

    def __init__(
        self, case: Case, candidate: Candidate, backend: Backend, device: torch.device, *, accelerated: bool = True
    ) -> None:
        self.on_gpu = device.type == "cuda"
        if self.on_gpu:
            take_workspaces(device)
        before = torch.cuda.memory_allocated(device) if self.on_gpu else 0
        torch.manual_seed(0)
        self.device, self.method, self._taken = device, candidate.method, 0
        self.model = candidate.build().to(device).train()
        self.channels_last = backend != "tf32"
        if self.channels_last:
            to_channels_last_(self.model)
        self.around = candidate.around(self.model)
        if backend == "compiled" and candidate.capturable:
            self.model.compile()
        self.optimizer = make_optimizer(self.model, case.optimizer, device)
        shape = (case.batch_size, 3, case.size, case.size)
        format = torch.channels_last if self.channels_last else torch.contiguous_format
        self.images = torch.randn(shape, device=device).contiguous(memory_format=format)
        self.labels = torch.randint(case.num_classes, (case.batch_size,), device=device)
        self.loss = torch.zeros((), device=device)
        autocast = autocast_for(device, low=self.channels_last)
        self.body = step_body(self.model, self.optimizer, lambda: [self._loss], autocast, accelerated=accelerated)
        self.parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self._captured: CapturedStep | None = None
        for _ in range(WARM_UP):
            self()
        if self.on_gpu and backend in ("captured", "compiled") and candidate.capturable:
            self._captured = CapturedStep(self.body, self.model, self.optimizer, [])
            self.memory: int | None = self._captured.peak_memory - before
        else:
            self.memory = self._measure_memory() - before if self.on_gpu else None

    def __call__(self) -> None:
        if self.method is not None:
            self.method.start_step(self.model, 0, self._taken)
            self._taken += 1
        (self._captured or self.body)()

    def _loss(self) -> Tensor:
        with self.around():
            loss = cross_entropy(self.model(self.images), self.labels)
        self.loss.copy_(loss.detach())
        return loss

    def _measure_memory(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self()
        return int(torch.cuda.max_memory_allocated(self.device))


@contextmanager
def precision_of(backend: Backend) -> Iterator[None]:
    """TF32 products and autotuned convolutions, as they are used for training, and as they were afterwards."""
    if backend not in get_args(Backend):
        raise ReplearnError(f"There is no backend {backend!r}; there are {', '.join(get_args(Backend))}.")
    with float32_products(tf32=True, benchmark=True), many_graphs() if backend == "compiled" else nullcontext():
        yield


def losses(step: TrainingStep, count: int) -> Tensor:
    found = []
    for _ in range(count):
        step()
        found.append(step.loss.clone())
    return torch.stack(found)
