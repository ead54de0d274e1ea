"""Fit one operator to the block that it replaces, in closed form; held-out rows decide whether to keep the fit."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ReplearnError
from ..operators._base.operator import Operator
from ..operators._base.ridge import Moments
from ..planning.data import Target
from ..planning.targets import build_operator
from .observe import Forward, observe, unpadded


@torch.no_grad()
def estimate_statistics_(module: nn.Module, calls: Iterable[Callable[[nn.Module], Any]]) -> bool:
    """Set every BatchNorm's running statistics to the averages over these calls; False where there is none."""
    norms = [
        layer
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is not None
    ]
    if not norms:
        return False
    before = [(norm, norm.momentum, norm.training) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain average of all batches
        norm.training = True
    try:
        for call in calls:
            call(module)
    finally:
        for norm, momentum, training in before:
            norm.momentum, norm.training = momentum, training
    return True


@dataclass(frozen=True, slots=True)
class Fit:
    """How well one operator imitates its block on held-out rows.

    Errors are mean squares over the block's output, divided by the mean square of its residual branch: 0 is a
    perfect imitation. Removal's own error is given too: 1, or less where an activation follows the sum.
    """

    name: str
    error: float
    removal_error: float
    ridge: float
    note: str = ""


class Imitation:
    """The fit of one target's operator to its block; the model is not changed.

    After `fit()` the `operator` is fitted, or keeps its initial weights if these do better on held-out rows.
    """

    def __init__(self, model: nn.Module, target: Target, data: Iterable[Any], forward: Forward | None) -> None:
        self.model, self.target, self.data, self.forward = model, target, data, forward
        self.operator = build_operator(model, target).eval()
        self.samples = 0

    def fit(self) -> Fit:
        operator, note = self.operator, ""
        operator.reset_parameters()
        error, removal = self.errors()
        start = {name: tensor.clone() for name, tensor in operator.state_dict().items()}
        ridge = None
        for index, stage in enumerate(stages := operator.stages()):  # each on the output of those before
            if (moments := self.moments(stage, stages[:index])) is not None:
                ridge = stage.fit(*moments)
        if ridge is None:
            note = "nothing of it can be fitted in closed form; it keeps its start"
        elif (fitted := self.errors()[0]) < error:  # on held-out data
            error = fitted
        else:
            operator.load_state_dict(start)
            ridge = None
        if not error <= removal:  # NaN counts as worse
            note = "; ".join(filter(None, (note, self.zero_branch())))
            error = self.errors()[0]
        return Fit(self.target.name, min(error, removal), removal, ridge or 0.0, note)

    def zero_branch(self) -> str:
        if not self.operator.zero_branch():
            raise ReplearnError(
                f"{self.target.name}: {self.target.operator.label()} does worse than removal on held-out data and "
                "can't be made to do nothing. Use another operator, or operators.Removal()."
            )
        return "no fit was better than removal, so its branch starts at zero"

    def moments(self, stage: Operator, before: tuple[Operator, ...]) -> tuple[Moments, Moments] | None:
        """Moments for fitting and held-out ones; None if there is nothing to fit."""
        fitting, held_out = (Moments(narrow=math.inf) for _ in range(2))
        self.samples = 0
        for call in observe(self.model, self.target, self.data, self.forward):
            self.samples += len(call.x)
            x = call.x
            for earlier in before:
                x = earlier.compute(x)
            preactivation = call.preactivation if stage.ends_in_activation else None
            branch = (call.y if preactivation is None else preactivation) - x
            for chunk, target, tokens in chunks(x, branch, call.tokens):
                if (rows := stage.regressors(chunk)) is None:
                    return None
                pair = (unpadded(v, tokens).double()[None] for v in (rows, branch_rows(target, self.target)))
                (held_out if call.held_out else fitting).add(*pair)
        return fitting, held_out

    def errors(self) -> tuple[float, float]:
        """Held-out errors of the operator and of removal, relative to the branch's power."""
        error = removal = power = 0.0
        for call in observe(self.model, self.target, self.data, self.forward, held_out=True):
            branch = (call.y if call.preactivation is None else call.preactivation) - call.x
            residuals = branch, call.run(self.operator) - call.y, call.x - call.y
            sums = [float(unpadded(residual, call.tokens).double().square().sum()) for residual in residuals]
            power, error, removal = power + sums[0], error + sums[1], removal + sums[2]
        power = power or 1.0
        return error / power if error == error else math.inf, removal / power


def branch_rows(branch: Tensor, target: Target) -> Tensor:
    last = branch.movedim(1, -1) if target.anatomy.kind in ("basic", "bottleneck") else branch
    return last.reshape(-1, last.shape[-1])


def chunks(x: Tensor, branch: Tensor, tokens: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Chunks whose patches take at most 256 MiB in float64."""
    per_sample = math.prod(x.shape[1:]) * 9 * 8
    size = max(1, 2**28 // per_sample)
    masks = itertools.repeat(None) if tokens is None else tokens.split(size)
    yield from zip(x.split(size), branch.split(size), masks, strict=False)


def check_data(data: Any) -> None:
    """Refuse data that can't be iterated over once for every target."""
    if not isinstance(data, Iterable):
        raise ReplearnError(f"Fitting takes a list or a loader of batches, got {type(data).__name__}.")
    if iter(data) is data:
        raise ReplearnError(
            "Fitting goes through the data once per target; give a list or a loader, not an iterator."
        )
