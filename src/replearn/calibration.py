"""Fit operators to the blocks of a trained model, in closed form, on a few batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .anatomy import resolve
from .errors import ReplearnError
from .operators.base import Operator
from .operators.fitting import Moments
from .plans import Plan, Target
from .similarity import call, unchanged
from .surgery import PLAN, check_fit, device_of, restored_on_error, set_submodule
from .table import text_table
from .targets import build_operator
from .whole import refuse_wrapped

Forward = Callable[[nn.Module, Any], Any]
HELD_OUT = 5  # every fifth batch is kept for choosing the ridge and for the reported errors


@dataclass(frozen=True, slots=True)
class Fit:
    """How well one operator imitates its block on held-out rows.

    Errors are mean squares over the block's output, divided by the mean square of its residual branch: 0 is a
    perfect imitation. Removal's own error stands beside it: 1, or less where an activation follows the sum.
    """

    name: str
    error: float
    removal_error: float
    ridge: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `calibrate_` did, target by target; `print` shows a table."""

    fits: tuple[Fit, ...]
    num_samples: int

    def __str__(self) -> str:
        rows = [(f.name, f"{f.error:.3f}", f"{f.removal_error:.3f}", f"{f.ridge:.0e}", f.note) for f in self.fits]
        head = ("module", "error", "removal", "ridge", "note")
        return "\n".join([f"fitted on {self.num_samples} samples", "", *text_table(head, rows, right=(1, 2, 3))])


def calibrate_(
    model: nn.Module, plan: Plan, data: Iterable[Any], *, forward: Forward | None = None
) -> Calibration:
    """Replace the planned blocks of a trained model by operators fitted to imitate them; no gradient step.

    `data` is a list or loader of batches that can be gone through again; each is a tensor, a tuple of arguments
    or a dict of keywords, or whatever `forward(model, batch)` understands. Targets are fitted one after
    another, so that later ones see earlier replacements. Every fifth batch is held out: it chooses the
    ridge and gives the errors in the report.

    Raises ReplearnError, with the model unchanged, for data that does not fit the model or gives NaN.
    """
    if not isinstance(plan, Plan):
        raise ReplearnError(
            f"calibrate_ takes a Plan, got {type(plan).__name__}; make one with replearn.plan(model)."
        )
    if iter(data) is data:
        raise ReplearnError(
            "calibrate_ goes through the data once per target; give a list or a loader, not an iterator."
        )
    refuse_wrapped(model)
    check_fit(model, plan)
    fits, samples = [], 0
    with restored_on_error(model, plan), unchanged(model), torch.no_grad():
        for target in plan.targets:
            fitted, samples = _calibrate_one(model, target, data, forward or call)
            fits.append(fitted)
        setattr(model, PLAN, plan)
    for target in plan.targets:
        model.get_submodule(target.name).train(model.training)
    return Calibration(tuple(fits), samples)


def _calibrate_one(model: nn.Module, target: Target, data: Iterable[Any], forward: Forward) -> tuple[Fit, int]:
    operator = build_operator(model, target, device_of(model, target)).eval()
    operator.reset_parameters()
    ridge, note, samples = 0.0, "", 0
    for index, stage in enumerate(operator.stages()):
        before = operator.stages()[:index]
        moments, held, samples = _moments(model, target, data, forward, stage, before)
        if held is None:
            note = "nothing of it can be fitted in closed form; it keeps its start"
            continue
        if not bool(torch.isfinite(moments.gram).all()):
            raise ReplearnError(f"{target.name}: its activations hold NaN or infinity on the calibration data.")
        ridge = stage.fit(moments, held)
    error, removal = _errors(model, target, data, forward, operator)
    if error > removal:
        silent = operator.silence()
        error = removal if silent else error
        worse = (
            "no fit was better than removal, so its branch starts at zero"
            if silent
            else "worse than removal, and this operator's form can't do nothing; use another"
        )
        note = f"{note}; {worse}" if note else worse
    set_submodule(model, target.name, operator)
    return Fit(target.name, error, removal, ridge, note), samples


def _moments(
    model: nn.Module,
    target: Target,
    data: Iterable[Any],
    forward: Forward,
    stage: Operator,
    before: tuple[Operator, ...],
) -> tuple[Moments, Moments | None, int]:
    """Moments for fitting and held-out ones; without a second batch, a fifth of the samples is held out."""
    parts: list[tuple[Moments, bool]] = []
    fitted, held = Moments(), Moments()
    samples = 0
    for number, (x, y, preactivation) in enumerate(observe(model, target, data, forward)):
        samples += len(x)
        aim = y if preactivation is None or not stage.ends_in_activation else preactivation
        for earlier in before:
            x = earlier.compute(x)
        branch = aim - x
        edge = max(1, len(x) - len(x) // HELD_OUT) if number == 0 else len(x)
        for rows, is_rest in ((slice(0, edge), False), (slice(edge, None), True)):
            if not len(x[rows]):
                continue
            part = Moments()
            for piece, aimed in chunks(x[rows], branch[rows]):
                features = stage.regressors(piece)
                if features is None:
                    return fitted, None, samples
                part.add(features, as_rows(aimed, target))
            if number == 0 and is_rest:
                parts.append((part, is_rest))
            elif number % HELD_OUT == 1:
                held.merge(part)
            else:
                fitted.merge(part)
    for part, _ in parts:  # the first batch's last fifth, needed only if no batch was held out
        (fitted if held.count else held).merge(part)
    if not fitted.count or not held.count:
        raise ReplearnError("The calibration data is empty, or its one batch has a single sample: give more.")
    return fitted, held, samples


def _errors(
    model: nn.Module, target: Target, data: Iterable[Any], forward: Forward, operator: Operator
) -> tuple[float, float]:
    """Mean squared output error of the operator and of removal on held-out data, over the branch's power."""
    error = removal = power = 0.0
    batches = list(observe(model, target, data, forward, held_out_only=True))
    for x, y, preactivation in batches:
        branch = (y if preactivation is None else preactivation) - x
        power += float(branch.double().square().sum())
        error += float((operator.compute(x) - y).double().square().sum())
        removal += float((x - y).double().square().sum())
    power = power or 1.0
    return error / power, removal / power


def observe(
    model: nn.Module, target: Target, data: Iterable[Any], forward: Forward, held_out_only: bool = False
) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Input, output and (for blocks that end in an activation) the value before it, batch by batch."""
    block = model.get_submodule(target.name)
    seen: dict[str, Tensor] = {}
    anatomy = target.anatomy

    def before_activation(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen["preactivation"] = args[0].clone()  # the last call counts; it may work in place

    def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen["x"] = (args[0] if args else kwargs[anatomy.input]).clone()

    def left(module: nn.Module, args: Any, made: Any) -> None:
        seen["y"] = made[0] if isinstance(made, tuple) else made
        raise _Reached

    handles = [block.register_forward_pre_hook(entered, with_kwargs=True), block.register_forward_hook(left)]
    if anatomy.kind in ("basic", "bottleneck"):
        activation = resolve(block, anatomy.parts["activation"].path)
        if isinstance(activation, nn.Module):
            handles.append(activation.register_forward_pre_hook(before_activation))
    total = 0
    try:
        for number, batch in enumerate(data):
            total += 1
            if held_out_only and number and number % HELD_OUT != 1:
                continue
            seen.clear()
            try:
                forward(model, batch)
            except _Reached:
                pass
            except ReplearnError:
                raise
            except Exception as error:
                raise ReplearnError(
                    f"{type(model).__name__} could not be run on calibration batch {number} "
                    f"({type(error).__name__}: {error}). Batches are passed as the model takes them: a tensor, "
                    "a tuple of arguments or a dict of keywords; for others give forward=lambda model, batch: ..."
                ) from error
            if "y" not in seen:
                raise ReplearnError(f"Calibration batch {number} never reached {target.name}.")
            if seen["x"].shape != seen["y"].shape:
                raise ReplearnError(
                    f"{target.name} turns {tuple(seen['x'].shape)} into {tuple(seen['y'].shape)}; "
                    "only blocks that keep the shape can be fitted."
                )
            yield seen["x"], seen["y"], seen.get("preactivation")
    finally:
        for handle in handles:
            handle.remove()
    if not total:
        raise ReplearnError("The calibration data is empty: give at least one batch.")


class _Reached(Exception):
    pass


def as_rows(branch: Tensor, target: Target) -> Tensor:
    last = branch.movedim(1, -1) if target.anatomy.kind in ("basic", "bottleneck") else branch
    return last.reshape(-1, last.shape[-1])


def chunks(x: Tensor, branch: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces small enough that their patches fit in a quarter of a gigabyte of float64."""
    per_sample = math.prod(x.shape[1:]) * 9 * 8
    size = max(1, 2**28 // per_sample)
    yield from zip(x.split(size), branch.split(size), strict=True)
