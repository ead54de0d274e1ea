"""What the cost model promises for a benchmark's candidates, to stand beside what is measured."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ...costs import Machine, named_machine, predict, probe
from ...costs.machines import DATA_SHEETS
from ...fast.kernels.reduced_bottleneck import free_launches
from .cases import FROZEN, LEAVES, Candidate, Case
from .steps import Backend

NOT_PROMISED = (LEAVES, FROZEN)  # they are RepL with its synthesis left out, to see what that costs


@dataclass(frozen=True, kw_only=True)
class Promised:
    """The predicted numbers of one candidate's training step."""

    milliseconds: float | None  # None where no machine is known
    memory: int  # bytes at the peak of the step
    activations: int  # bytes kept for the backward pass
    training_flops: int

    def over(self, base: Promised, what: str) -> float | None:
        mine, theirs = getattr(self, what), getattr(base, what)
        return mine / theirs if mine is not None and theirs else None


def promised(
    case: Case, sides: Iterable[Candidate], backend: Backend, machine: Machine | None
) -> dict[str, Promised]:
    """Predict every candidate's training step from shapes, by label; E2E is the first."""
    layout = torch.contiguous_format if backend == "tf32" else torch.channels_last
    shape = (case.batch_size, 3, case.size, case.size)
    example = torch.empty(shape, device="meta", memory_format=layout)
    precision = "tf32" if backend == "tf32" else "bfloat16"
    optimizer = case.optimizer
    states = "sgd_momentum" if optimizer.name == "sgd" and optimizer.momentum else optimizer.name
    found: dict[str, Promised] = {}
    for side in sides:
        if side.label in NOT_PROMISED or side.method is not None:
            continue
        model = side.build().to("meta")
        with free_launches() if backend in ("captured", "compiled") else nullcontext():
            cost = predict(model, example, optimizer=states, precision=precision, machine=machine)
        found[side.label] = Promised(
            milliseconds=1000 * cost.total.seconds if machine is not None else None,
            memory=cost.peak_bytes,
            activations=cost.total.activation_bytes,
            training_flops=cost.total.training_flops,
        )
    return found


def machine_for(device: torch.device, gpu: str | None = None, probed: bool = False) -> Machine | None:
    """The named GPU, this machine after a probe, or this one by its name; None where no times are known of it."""
    if gpu is not None:
        return named_machine(gpu)
    if probed:
        return probe(device)
    if device.type != "cuda":
        return None
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    return next((named_machine(name) for name in DATA_SHEETS if name.split()[-1] in words), None)
