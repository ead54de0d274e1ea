"""How far a replaced model's outputs are from the full one's, next to what bounds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .results import Deviation, LocalError, Suffix
from .subject import Subject, lengths


@torch.no_grad()
def deviation(subject: Subject, model: nn.Module, parts: Sequence[tuple[LocalError, Suffix]]) -> Deviation:
    """Measured on the held-out batches; the bounds add up the local errors times what amplifies them."""
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


@torch.no_grad()
def quality(subject: Subject, model: nn.Module) -> tuple[float, float | None]:
    """The mean loss over the held-out batches, and the mean score where one was given."""
    losses, scores = [], []
    for number, batch in enumerate(subject.held):
        made = subject.output(model, number)
        losses.append(float(subject.mean_loss(made, number)))
        if subject.score is not None:
            scores.append(float(subject.score(made, batch)))
    return sum(losses) / len(losses), sum(scores) / len(scores) if scores else None
