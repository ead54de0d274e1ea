"""Training steps on fixed random batches, side by side: build every candidate, then time them in turns.

Two runs of a benchmark can differ by more than the rounds of either: what a build happens to get, as its place in
memory, stays the same from round to round. So a careful measurement builds everything several times.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ...costs.precision import float32_products
from ...errors import ReplearnError
from ...fast.graphs.capture import take_workspaces
from ...planning.serialization import encode
from ..training.optimizers import make_optimizer
from ..training.run import count_flops, to_channels_last_
from ..training.step import CapturedStep, autocast_for, many_graphs, step_body
from .cases import E2E, REMOVAL, REPL, Candidate, Case, candidates
from .record import Comparison, Row
from .timing import Timing, elapsed, interleave, ratio

# all but tf32 in bfloat16 autocast and channels_last; captured and compiled steps are replayed as a CUDA graph
Backend = Literal["tf32", "bf16", "captured", "compiled"]
WARM_UP = 3


class TrainingStep:
    """One candidate's model, optimizer and batch. Calling it takes a step; `memory` is the most it needed.

    It is the trainer's step, inside `replearn.fast.accelerate`.
    """

    def __init__(self, case: Case, candidate: Candidate, backend: Backend, device: torch.device) -> None:
        if on_gpu := device.type == "cuda":
            take_workspaces(device)
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        torch.manual_seed(0)
        self.method, self._taken = candidate.method, 0
        self.model = candidate.build().to(device).train()
        self.channels_last = backend != "tf32"
        if self.channels_last:
            to_channels_last_(self.model)
        if backend == "compiled" and candidate.capturable:
            self.model.compile()
        self.optimizer = make_optimizer(self.model, case.optimizer, device)
        shape = (case.batch_size, 3, case.size, case.size)
        format = torch.channels_last if self.channels_last else torch.contiguous_format
        self.images = torch.randn(shape, device=device).contiguous(memory_format=format)
        self.labels = torch.randint(case.num_classes, (case.batch_size,), device=device)
        self.loss = torch.zeros((), device=device)
        autocast = autocast_for(device, low=self.channels_last)
        self.body = step_body(self.model, self.optimizer, lambda: [self._loss], autocast)
        self.parameters = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self._captured: CapturedStep | None = None
        for _ in range(WARM_UP):
            self()
        if on_gpu and backend in ("captured", "compiled") and candidate.capturable:
            self._captured = CapturedStep(self.body, self.model, self.optimizer, [])
            self.memory: int | None = self._captured.peak_memory - before
        else:
            self.memory = None
            if on_gpu:
                torch.cuda.synchronize(device)
                torch.cuda.reset_peak_memory_stats(device)
                self()
                self.memory = torch.cuda.max_memory_allocated(device) - before

    def __call__(self) -> None:
        if self.method is not None:
            self.method.start_step(self.model, 0, self._taken)
            self._taken += 1
        (self._captured or self.body)()

    def _loss(self) -> Tensor:
        loss = cross_entropy(self.model(self.images), self.labels)
        self.loss.copy_(loss.detach())
        return loss


@contextmanager
def precision_of(backend: Backend) -> Iterator[None]:
    """TF32 products and autotuned convolutions, as they are used for training, and as they were afterwards."""
    if backend not in get_args(Backend):
        raise ReplearnError(f"There is no backend {backend!r}; there are {', '.join(get_args(Backend))}.")
    with float32_products(tf32=True, benchmark=True), many_graphs() if backend == "compiled" else nullcontext():
        yield


def compare_steps(
    case: Case,
    backend: Backend,
    device: torch.device,
    *,
    sides: Sequence[Candidate] | None = None,
    rounds: int = 10,
    inner: int = 3,
    builds: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Time the training steps of all candidates of a case on one backend, and compare them with E2E.

    All are built `builds` times and timed for `rounds` each time.
    """
    chosen = list(candidates(case) if sides is None else sides)
    if chosen[0].label != E2E:
        raise ReplearnError("The first candidate is E2E, which all others are compared with.")
    if builds < 1:
        raise ReplearnError(f"builds={builds}: there is nothing to time unless everything is built once or more.")
    notes: list[str] = []
    for side in [side for side in chosen if side.method is not None]:
        try:
            side.build()
        except ReplearnError as error:  # a method for other models: the rest is worth measuring
            chosen.remove(side)
            notes.append(str(error))
        if not side.capturable and backend in ("captured", "compiled"):
            notes.append(f"{side.label} takes another path each step, so it ran as it is written")
    if backend == "tf32" and device.type != "cuda":
        notes.append("a CPU has no TF32: the step ran in float32")
    if backend == "captured" and device.type != "cuda":
        notes.append("there is nothing to capture on a CPU: the step ran as it is written")
    times: dict[str, list[float]] = {side.label: [] for side in chosen}
    memory: dict[str, int | None] = dict.fromkeys(times)
    parameters: dict[str, int] = {}
    with precision_of(backend):
        for turn in range(builds):  # in another order each time, so that each comes to lie elsewhere
            if builds > 1:
                say(f"{case.title}, {backend}: build {turn + 1} of {builds}")
            start = turn % len(chosen)
            steps: dict[str, TrainingStep] = {}
            for side in chosen[start:] + chosen[:start]:
                say(f"{case.title}, {backend}: building {side.label}")
                steps[side.label] = TrainingStep(case, side, backend, device)
            each = sum(elapsed(step, device, 1) for step in steps.values()) / 1000
            say(f"{case.title}, {backend}: timing, about {each * (WARM_UP + rounds * inner):.0f} s")
            for label, timing in interleave(steps, device, rounds=rounds, inner=inner).items():
                times[label] += timing.milliseconds
                parameters[label] = steps[label].parameters
                if (most := steps[label].memory) is not None:
                    memory[label] = max(most, memory[label] or 0)
            del steps
            if device.type == "cuda":
                gc.collect()  # modules are full of cycles, and what comes next wants the memory
                torch.cuda.empty_cache()
    timings = {label: Timing(milliseconds=tuple(found)) for label, found in times.items()}
    example = torch.empty(1, 3, case.size, case.size, device="meta")
    flops = {side.label: count_flops(side.build().to("meta"), example) for side in chosen}
    base = memory[E2E]
    rows = tuple(
        Row(
            label=label,
            timing=timing,
            time=ratio(timing, timings[E2E]),
            memory=memory[label],
            memory_ratio=None if base is None else (memory[label] or 0) / base,
            parameters=parameters[label],
            flops=flops[label],
        )
        for label, timing in timings.items()
    )
    removed = flops[E2E] - flops[REMOVAL]
    eta = (flops[REPL] - flops[REMOVAL]) / removed
    allowed = (1 - ratio(timings[REMOVAL], timings[E2E]).median) * (1 - eta)
    reached = 1 - ratio(timings[REPL], timings[E2E]).median
    return Comparison(
        case=encode(case),
        title=case.title,
        backend=backend,
        rows=rows,
        eta=eta,
        yield_=reached / allowed if allowed > 0 else None,
        notes=tuple(notes),
    )
