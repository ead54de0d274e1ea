"""Local replacement errors: each operator against its block, on the same inputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..fitting.observe import observe
from ..planning.data import Target
from .results import LocalError
from .subject import Subject, exchanged, lengths


@torch.no_grad()
def local_error(subject: Subject, target: Target, *, together: bool) -> LocalError:
    """epsilon_r over the held-out samples, on the full model's activations or behind earlier replacements."""
    operator = subject.replaced.get_submodule(target.name)
    block = subject.full.get_submodule(target.name)
    model: nn.Module = subject.replaced if together else subject.full
    rows: list[Tensor] = []
    missed = branch = 0.0
    with exchanged(model, target.name, block):
        for seen in observe(model, target, subject.held, subject.forward, split=False):
            error, gone = seen.through(operator) - seen.y, seen.x - seen.y
            rows.append(torch.stack([lengths(error), lengths(gone), lengths(seen.x)]))
            missed += float(error.double().square().sum())
            branch += float(gone.double().square().sum())
    wrong, removed, height = torch.cat(rows, dim=1)
    ratios = wrong / height.clamp_min(1)
    return LocalError(
        epsilon=float(ratios.max()),
        mean=float(ratios.mean()),
        absolute=float(wrong.max()),
        relative=missed / branch if branch else 0.0,
        removal=float((removed / height.clamp_min(1)).max()),
        height=float(height.max()),
    )
