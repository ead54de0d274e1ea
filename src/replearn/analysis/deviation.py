"""Local errors of the operators, and deviations of the outputs from the full model's."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..fitting.observe import observe
from ..planning.data import Target
from .results import Deviation, LocalError, Suffix
from .subject import Subject, exchanged, lengths


@torch.no_grad()
def local_error(subject: Subject, target: Target, *, together: bool) -> LocalError:
    """epsilon_r over the held-out samples, on the full model's activations or behind earlier replacements."""
    operator = subject.replaced.get_submodule(target.name)
    model = subject.replaced if together else subject.full
    rows: list[Tensor] = []
    with exchanged(model, target.name, subject.full.get_submodule(target.name)):
        for seen in observe(model, target, subject.held, subject.forward, split=False):
            parts = seen.run(operator) - seen.y, seen.x - seen.y, seen.x
            rows.append(torch.stack([lengths(part) for part in parts]))
    wrong, removed, height = torch.cat(rows, dim=1)
    ratios, branch = wrong / height.clamp_min(1), float(removed.square().sum())
    return LocalError(
        epsilon=float(ratios.max()),
        absolute=float(wrong.max()),
        relative=float(wrong.square().sum()) / branch if branch else 0.0,
        removal=float((removed / height.clamp_min(1)).max()),
        height=float(height.max()),
    )


@torch.no_grad()
def deviation(subject: Subject, model: nn.Module, parts: Sequence[tuple[LocalError, Suffix]]) -> Deviation:
    """The deviation on the held-out batches, and its bounds: sums of local errors times suffix factors."""
    far, relative, agreement = differences(subject, model)
    return Deviation(
        measured=float(far.max()),
        mean=float(far.mean()),
        relative=relative,
        agreement=agreement,
        bound=sum(suffix.factor * local.epsilon * max(local.height, 1) for local, suffix in parts),
        sharp=sum(suffix.factor * local.absolute for local, suffix in parts),
        printed=sum(suffix.product * local.epsilon * max(local.height, 1) for local, suffix in parts),
    )


@torch.no_grad()
def differences(subject: Subject, model: nn.Module) -> tuple[Tensor, float, float]:
    """Each sample's |F_RepL - F|, the relative deviation, and the share of equal predictions."""
    far, size = [], []
    same = count = 0
    for number, full in enumerate(subject.reference):
        made = subject.output(model, number)
        far.append(lengths(made - full))
        size.append(lengths(full))
        same += int((made.argmax(-1) == full.argmax(-1)).sum())
        count += full.argmax(-1).numel()
    distance = torch.cat(far)
    power = float(torch.cat(size).square().sum()) or 1.0
    return distance, float((distance.square().sum() / power).sqrt()), same / count
