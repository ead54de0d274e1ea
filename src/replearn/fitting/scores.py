"""Score blocks of a trained model by how well their operators can imitate them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..blocks.running import unchanged
from ..errors import ReplearnError
from ..planning.data import Target
from .closed_form import Imitation
from .observe import Forward


@dataclass(frozen=True, slots=True)
class Score:
    """How far a fitted operator's output is from its block's on held-out rows, as a share of the output's power.

    `unexplained` is the same error over the power of the residual branch: what `calibrate_` reports for a plan
    of this target alone. Shares of the output compare blocks with one another: to miss half of a branch that
    hardly changes its input does little harm.
    """

    name: str
    error: float
    removal_error: float
    unexplained: float


def fitted_errors(
    model: nn.Module, targets: Sequence[Target], data: Iterable[Any], forward: Forward | None = None
) -> tuple[Score, ...]:
    """Fit every target's operator by itself, in the intact model, as `calibrate_` does, and score it.

    The model stays as it was. Raises ReplearnError for data that does not fit, and for NaN.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ReplearnError(
            f"The error of a replacement needs a model with values, and this {type(model).__name__} is on the "
            "meta device. Score by 'count', or take the model itself."
        )
    if iter(data) is data:
        raise ReplearnError(
            "Scoring by error goes through the data once per target; give a list or a loader, not an iterator."
        )
    with unchanged(model), torch.no_grad():
        return tuple(_score(Imitation(model, target, data, forward)) for target in targets)


def _score(imitation: Imitation) -> Score:
    fit, share = imitation.fit(), imitation.branch_share
    return Score(fit.name, fit.error * share, fit.removal_error * share, fit.error)
