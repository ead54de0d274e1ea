"""Score blocks of a trained model by how well their operators can imitate them, all in one pass over the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .anatomy import resolve
from .calibration import HELD_OUT, Forward, as_rows, chunks
from .errors import ReplearnError
from .operators.base import Operator
from .operators.fitting import Moments
from .plans import Target
from .similarity import call, unchanged
from .surgery import device_of
from .targets import build_operator

SAMPLES = 32  # held-out samples kept for each target: enough for an error, and memory does not grow with the data


@dataclass(frozen=True, slots=True)
class Score:
    """How far an operator's output is from its block's on held-out samples, as a share of the output's power."""

    name: str
    error: float
    removal_error: float


@dataclass
class Fitting:
    """One target on its way through the data."""

    target: Target
    operator: Operator
    moments: Moments = field(default_factory=Moments)
    held: Moments = field(default_factory=Moments)
    aside: Moments = field(default_factory=Moments)  # the first batch's last fifth, in case no batch is held out
    kept: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    kept_aside: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    fits: bool = True


def fitted_errors(
    model: nn.Module, targets: Sequence[Target], data: Iterable[Any], forward: Forward | None = None
) -> tuple[Score, ...]:
    """Fit every target's operator by itself, in the intact model, and score it on held-out samples.

    The model runs once over the data for all targets together (once more for operators that are fitted in two
    stages), and stays as it was. Raises ReplearnError for data that does not fit, and for NaN.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ReplearnError(
            f"The error of a replacement needs a model with values, and this {type(model).__name__} is on the "
            "meta device. Score by 'count', or take the model itself."
        )
    with unchanged(model), torch.no_grad():
        fittings = [Fitting(target, _operator(model, target)) for target in targets]
        stages = max((len(fitting.operator.stages()) for fitting in fittings), default=0)
        if stages > 1 and iter(data) is data:
            raise ReplearnError("This operator is fitted in two stages: give a list or a loader, not an iterator.")
        for stage in range(stages):
            for number, batch in enumerate(_batches(data)):
                with ExitStack() as hooks:
                    reached = {
                        f.target.name: hooks.enter_context(_watched(model, f, stage, number)) for f in fittings
                    }
                    _run(model, batch, number, forward or call)
                for name, calls in reached.items():
                    if not calls:
                        raise ReplearnError(f"Calibration batch {number} never reached {name}.")
            for fitting in fittings:
                _fit(fitting, stage)
        return tuple(_score(fitting) for fitting in fittings)


def _operator(model: nn.Module, target: Target) -> Operator:
    operator = build_operator(model, target, device_of(model, target)).eval()
    operator.reset_parameters()
    return operator


def _batches(data: Iterable[Any]) -> Iterator[Any]:
    number = 0
    for batch in data:
        yield batch
        number += 1
    if not number:
        raise ReplearnError("The calibration data is empty: give at least one batch.")


def _run(model: nn.Module, batch: Any, number: int, forward: Forward) -> None:
    try:
        forward(model, batch)
    except ReplearnError:
        raise
    except Exception as error:
        raise ReplearnError(
            f"{type(model).__name__} could not be run on calibration batch {number} ({type(error).__name__}: "
            f"{error}). Batches are passed as the model takes them: a tensor, a tuple of arguments or a dict of "
            "keywords."
        ) from error


@contextmanager
def _watched(model: nn.Module, fitting: Fitting, stage: int, number: int) -> Iterator[list[int]]:
    """Take up what goes into a block and what comes out, while one batch runs; gives a mark for each call."""
    block, anatomy = model.get_submodule(fitting.target.name), fitting.target.anatomy
    seen: dict[str, Tensor] = {}
    calls: list[int] = []

    def before_activation(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen["aim"] = args[0].clone()  # the last call counts; it may work in place

    def entered(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.clear()
        seen["x"] = (args[0] if args else kwargs[anatomy.input]).clone()

    def left(module: nn.Module, args: Any, made: Any) -> None:
        calls.append(number)
        y = made[0] if isinstance(made, tuple) else made
        if y.shape != seen["x"].shape:
            raise ReplearnError(
                f"{fitting.target.name} turns {tuple(seen['x'].shape)} into {tuple(y.shape)}; only blocks that "
                "keep the shape can be fitted."
            )
        _take(fitting, stage, number, seen["x"], y, seen.get("aim"))

    handles = [block.register_forward_pre_hook(entered, with_kwargs=True), block.register_forward_hook(left)]
    if anatomy.kind in ("basic", "bottleneck"):
        activation = resolve(block, anatomy.parts["activation"].path)
        if isinstance(activation, nn.Module):
            handles.append(activation.register_forward_pre_hook(before_activation))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _take(fitting: Fitting, stage: int, number: int, x: Tensor, y: Tensor, before: Tensor | None) -> None:
    """Add one batch to the moments: to the held-out ones every fifth time."""
    stages = fitting.operator.stages()
    if stage >= len(stages):
        return
    if not bool(torch.isfinite(y).all()):
        raise ReplearnError(
            f"{fitting.target.name}: its activations hold NaN or infinity on calibration batch {number}."
        )
    edge = max(1, len(x) - len(x) // HELD_OUT) if number == 0 else len(x)
    held = number % HELD_OUT == 1
    if stage == 0 and number == 0:
        fitting.kept_aside.append((x[edge:][:SAMPLES].clone(), y[edge:][:SAMPLES].clone()))
    room = SAMPLES - sum(len(kept) for kept, _ in fitting.kept)
    if stage == 0 and held and room > 0:
        fitting.kept.append((x[:room].clone(), y[:room].clone()))
    operator = stages[stage]
    aim = y if before is None or not operator.ends_in_activation else before
    for earlier in stages[:stage]:
        x = earlier.compute(x)
    branch = aim - x
    for rows, into in (
        (slice(0, edge), fitting.held if held else fitting.moments),
        (slice(edge, None), fitting.aside),
    ):
        for piece, aimed in chunks(x[rows], branch[rows]) if len(x[rows]) else ():
            features = operator.regressors(piece)
            if features is None:
                fitting.fits = False
                return
            into.add(features, as_rows(aimed, fitting.target))


def _fit(fitting: Fitting, stage: int) -> None:
    stages = fitting.operator.stages()
    if stage < len(stages) and fitting.fits:
        if fitting.aside.count:
            (fitting.moments if fitting.held.count else fitting.held).merge(fitting.aside)
        if not fitting.moments.count or not fitting.held.count:
            raise ReplearnError("The calibration data is empty, or its one batch has a single sample: give more.")
        stages[stage].fit(fitting.moments, fitting.held)
    fitting.moments, fitting.held, fitting.aside, fitting.fits = Moments(), Moments(), Moments(), True


def _score(fitting: Fitting) -> Score:
    """Never above removal's: an operator that can't beat it would be silenced."""
    error = removal = power = 0.0
    for x, y in fitting.kept or fitting.kept_aside:
        power += float(y.double().square().sum())
        error += float((fitting.operator.compute(x) - y).double().square().sum())
        removal += float((x - y).double().square().sum())
    power = power or 1.0
    if error > removal and fitting.operator.silence():
        error = removal
    return Score(fitting.target.name, error / power, removal / power)
