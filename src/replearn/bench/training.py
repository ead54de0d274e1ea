"""Training steps side by side: build every candidate, then time them in turns."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from ..costs import Machine
from ..errors import ReplearnError
from ..jsonable import encode
from .cases import E2E, FROZEN, LEAVES, RECOMPUTED, REMOVAL, REPL, Candidate, Case, candidates
from .launching import launching
from .promised import Promised, promised
from .record import Comparison, Row
from .steps import Backend, TrainingStep, flops_of, precision_of
from .timing import interleave, ratio

Say = Callable[[str], None]


def compare_steps(
    case: Case,
    backend: Backend,
    device: torch.device,
    *,
    sides: Sequence[Candidate] | None = None,
    rounds: int = 10,
    inner: int = 3,
    machine: Machine | None = None,
    say: Say = lambda text: None,
) -> Comparison:
    """Time the training steps of all candidates of a case on one backend, and compare them with E2E.

    Beside what is measured stands what the cost model promises; times only for a `machine`.
    """
    chosen = list(candidates(case) if sides is None else sides)
    if chosen[0].label != E2E:
        raise ReplearnError("The first candidate is E2E, which all others are compared with.")
    notes: list[str] = []
    if backend == "compiled":  # a compiled graph makes its own weights
        chosen = [side for side in chosen if side.label not in (LEAVES, FROZEN, RECOMPUTED)]
    if backend == "captured" and device.type != "cuda":
        notes.append("there is nothing to capture on a CPU: the step ran as it is written")
    with precision_of(backend):
        steps: dict[str, TrainingStep] = {}
        for side in chosen:
            say(f"{case.title}, {backend}: building {side.label}")
            steps[side.label] = TrainingStep(case, side, backend, device)
        say(f"{case.title}, {backend}: timing")
        timings = interleave(steps, device, rounds=rounds, inner=inner)
        hosts = launching(steps, device, runs=3)
        memory = {label: step.memory for label, step in steps.items()}
        sizes = {label: step.parameters for label, step in steps.items()}
        del steps
        gc.collect()  # modules are full of cycles, and the next case wants the memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
    example = torch.empty(1, 3, case.size, case.size, device="meta")
    flops = {side.label: flops_of(side.build(), example) for side in chosen}
    promises: dict[str, Promised] = {}
    try:
        promises = promised(case, chosen, backend, machine)
    except ReplearnError as error:  # what was measured is worth keeping without it
        notes.append(f"its costs can't be predicted: {error}")
    base = memory[E2E]
    rows = tuple(
        Row(
            label=label,
            timing=timing,
            time=ratio(timing, timings[E2E]),
            memory=memory[label],
            memory_ratio=None if base is None else (memory[label] or 0) / base,
            parameters=sizes[label],
            flops=flops[label],
            promised=promises.get(label),
            launching=hosts.get(label),
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
        synthesis=ratio(timings[REPL], timings[LEAVES]) if LEAVES in timings else None,
        frozen=ratio(timings[REPL], timings[FROZEN]) if FROZEN in timings else None,
        notes=tuple(notes),
        machine=machine,
    )
