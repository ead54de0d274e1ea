"""Make a plan: choose targets, sources and operators, without changing the model."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ..blocks.stacks import Stack, find_stacks
from ..errors import ReplearnError
from ..operators._base.options import Options, options_named
from .data import Plan, Skipped, Target
from .legality import Survey
from .table import few
from .targets import trainable
from .validate import refuse_wrapped


def plan(
    model: nn.Module,
    interval: int = 4,
    first: int | None = None,
    *,
    fraction: float | None = None,
    targets: Sequence[str] | None = None,
    operator: Options | str | None = None,
) -> Plan:
    """Plan by an interval, a fraction or names; see `replearn.plan`, which plans by a budget too."""
    stacks = stacks_of(model)
    options = options_named(operator) if isinstance(operator, str) else operator
    names = _check_arguments(interval, first, fraction, targets, options)
    survey = Survey(model, stacks, options)
    skipped: list[Skipped] = []
    if names is not None:
        chosen = survey.named(names)
        placement = "named targets"
    elif fraction is not None:
        chosen = survey.by_fraction(fraction)
        placement = f"fraction={fraction}"
    else:
        begins = survey.first_positions(interval, first)
        chosen, skipped = survey.by_interval(interval, begins)
        placement = f"interval={interval}, first={' or '.join(map(str, sorted(set(begins.values()))))}"
    if not chosen:
        skipped = skipped or survey.by_interval(2, survey.first_positions(2, 2))[1]  # for the error message
        raise ReplearnError(_no_targets(survey, placement, skipped))
    return plan_of_targets(model, chosen, placement, len(survey.places), skipped, survey.notes(chosen))


def stacks_of(model: nn.Module) -> tuple[Stack, ...]:
    """The stacks of a model that can be planned; ReplearnError if there are none."""
    refuse_wrapped(model)
    stacks = find_stacks(model)
    if not stacks:
        raise ReplearnError(
            f"{type(model).__name__} has no stack of blocks: no known block class, and no three equal siblings "
            "that feed each other. Give your block class a `replearn_anatomy`, or put the blocks into one "
            "nn.ModuleList."
        )
    return stacks


def plan_of_targets(
    model: nn.Module,
    targets: Sequence[Target],
    placement: str,
    num_blocks: int,
    skipped: Sequence[Skipped] = (),
    notes: Sequence[str] = (),
) -> Plan:
    """The plan with these targets, and the parameters that the model has before and after, deployed too."""
    deployed = sum(p.numel() for p in _kept(model, targets)) + sum(t.parameters_deployed or 0 for t in targets)
    return Plan(
        type(model).__name__,
        placement,
        num_blocks,
        tuple(targets),
        tuple(skipped),
        *count_parameters(model, targets),
        tuple(notes),
        sum(parameter.numel() for parameter in model.parameters()),
        deployed,
    )


def _no_targets(survey: Survey, placement: str, skipped: Sequence[Skipped]) -> str:
    """Why a placement has no targets, and which one would have some."""
    text = f"This plan for {type(survey.model).__name__} has no targets ({placement}): "
    kept: dict[str, list[str]] = {}
    for entry in skipped:
        kept.setdefault(entry.reason, []).append(entry.name)
    if kept:
        text += "; ".join(f"{few(names)} can't go ({reason})" for reason, names in kept.items()) + ". "
    else:
        lengths = ", ".join(str(len(stack)) for stack in survey.stacks)
        text += f"its stacks have {lengths} blocks, and a target needs a block on each side. "
    if max(map(len, survey.stacks)) < 3:
        return text + "No block of it can be replaced: take a deeper model."
    cure = survey.cure(entry.name for entry in skipped)
    return text + (cure or "Try first=2, a smaller interval or another operator.")


def _check_arguments(
    interval: Any, first: Any, fraction: Any, targets: Any, operator: Any
) -> tuple[str, ...] | None:
    """Raise for invalid or conflicting arguments; returns the named targets, if any."""
    if not isinstance(interval, int) or isinstance(interval, bool) or interval < 2:
        raise ReplearnError(
            f"interval={interval!r}: an interval is a whole number of at least 2, because a target's "
            "neighbours must stay."
        )
    if first is not None and (not isinstance(first, int) or isinstance(first, bool) or first < 2):
        raise ReplearnError(
            f"first={first!r}: positions count from 1, and the first block of a stack is never a target; "
            "write first=2 for the densest placement."
        )
    if fraction is not None and not (
        isinstance(fraction, (int, float)) and not isinstance(fraction, bool) and 0 < fraction < 1
    ):
        raise ReplearnError(f"fraction={fraction!r}: a fraction lies between 0 and 1, as 0.25.")
    names = None
    if targets is not None:
        names = tuple(targets) if isinstance(targets, Iterable) else (None,)
        if isinstance(targets, (str, bytes)) or not all(isinstance(name, str) for name in names):
            raise ReplearnError(f"targets={targets!r}: write a list of block names, as ['layer3.3'].")
        if not names:
            raise ReplearnError("targets=[] names no block: write their names, as ['layer3.3'], or leave it out.")
        if fraction is not None or first is not None or interval != 4:
            raise ReplearnError("targets already names the blocks; leave out interval, first and fraction.")
    if fraction is not None and (first is not None or interval != 4):
        raise ReplearnError(f"fraction={fraction!r} places the targets itself; leave out interval and first.")
    if operator is not None and not isinstance(operator, Options):
        hint = f"{operator.__name__}()" if isinstance(operator, type) else "operators.Basic()"
        raise ReplearnError(
            f"operator={operator!r} is not an operator's options; write an instance from replearn.operators, "
            f"as {hint}."
        )
    return names


def count_parameters(model: nn.Module, targets: Sequence[Target]) -> tuple[int, int]:
    """Trainable parameters before and after, each shared tensor counted once."""
    after = trainable(_kept(model, targets)) + sum(target.parameters_after for target in targets)
    return trainable(model.parameters()), after


def _kept(model: nn.Module, targets: Sequence[Target]) -> list[nn.Parameter]:
    removed = tuple(f"{target.name}." for target in targets)
    every = model.named_parameters(remove_duplicate=False)
    return list({id(parameter): parameter for name, parameter in every if not name.startswith(removed)}.values())
