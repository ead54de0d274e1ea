"""Training steps side by side: build every candidate, then time them in turns.

Two runs of a benchmark can differ by more than the rounds of either: what a build happens to get, as its place in
memory, stays the same from round to round. So a careful measurement builds everything several times.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from ...costs import Machine
from ...errors import ReplearnError
from ...planning.serialization import encode
from ..training.run import count_flops
from .cases import E2E, FROZEN, LEAVES, REMOVAL, REPL, Candidate, Case, candidates
from .promised import Promised, promised
from .record import Comparison, Row
from .steps import Backend, TrainingStep, precision_of
from .timing import Timing, interleave, ratio

Say = Callable[[str], None]


def compare_steps(
    case: Case,
    backend: Backend,
    device: torch.device,
    *,
    sides: Sequence[Candidate] | None = None,
    rounds: int = 10,
    inner: int = 3,
    builds: int = 1,
    machine: Machine | None = None,
    say: Say = lambda text: None,
) -> Comparison:
    """Time the training steps of all candidates of a case on one backend, and compare them with E2E.

    All are built `builds` times and timed for `rounds` each time. Times are predicted only for a `machine`.
    """
    chosen = list(candidates(case) if sides is None else sides)
    if chosen[0].label != E2E:
        raise ReplearnError("The first candidate is E2E, which all others are compared with.")
    if builds < 1:
        raise ReplearnError(f"builds={builds}: there is nothing to time unless everything is built once or more.")
    notes: list[str] = []
    if backend == "compiled":  # a compiled graph makes its own weights
        chosen = [side for side in chosen if side.label not in (LEAVES, FROZEN)]
    for side in [side for side in chosen if side.method is not None]:
        try:
            side.build()
        except ReplearnError as error:  # a method for other models: the rest is worth measuring
            chosen.remove(side)
            notes.append(str(error))
        if not side.capturable and backend in ("captured", "compiled"):
            notes.append(f"{side.label} takes another path each step, so it ran as it is written")
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
            say(f"{case.title}, {backend}: timing")
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
            parameters=parameters[label],
            flops=flops[label],
            promised=promises.get(label),
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
