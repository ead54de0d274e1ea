"""Decide everything about a replacement; the model is not touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ..blocks.stacks import Stack, find_stacks
from ..errors import ReplearnError
from ..operators._base.options import Options, options_named
from .data import Plan, Skipped, Target
from .legality import Survey
from .targets import trainable
from .validate import refuse_wrapped


def plan(
    model: nn.Module,
    interval: int = 4,
    first: int | None = None,
    *,
    fraction: float | None = None,
    targets: Sequence[str] | None = None,
    similarity: Any = None,
    operator: Options | str | None = None,
) -> Plan:
    """Plan which blocks of a model to replace; the model stays bit-identical, and may be on meta.

    - `interval`, `first`: the placement r = first, first + K, ... in every stack. If `first` is not given, it is
      K, and 2 in a stack where K takes at most one block and 2 takes more. `first=interval` is the paper's rule.
    - `fraction`: a share of all blocks, spread evenly, instead of an interval.
    - `targets`: the names of the blocks, instead of either.
    - `similarity`: a calibration batch; as many targets as the interval or the fraction gives, where
      a block's output is most like its input.
    - `operator`: options from `replearn.operators`, or a name as 'reduced_bottleneck'; by default the paper's for
      the kind of block.

    Raises ReplearnError for what can't be honoured. With an interval or a fraction, a block that has to be
    kept is listed in `plan.skipped`; a block that you name and that has to be kept is an error.

    >>> import replearn
    >>> plan = replearn.plan(replearn.models.resnet32())
    >>> [target.name for target in plan.targets]
    ['layer1.3', 'layer2.3', 'layer3.3']
    """
    refuse_wrapped(model)
    stacks = find_stacks(model)
    if not stacks:
        raise ReplearnError(
            f"{type(model).__name__} has no stack of blocks: no known block class, and no nn.Sequential or "
            "nn.ModuleList with at least three equal siblings that feed each other. Give your block class a "
            "`replearn_anatomy`, or put the blocks into one nn.ModuleList."
        )
    options = options_named(operator) if isinstance(operator, str) else operator
    names = _check_arguments(interval, first, fraction, targets, similarity, options)
    survey = Survey(model, stacks, options)
    skipped: list[Skipped] = []
    if names is not None:
        chosen = survey.named(names)
        placement = "named targets"
    elif fraction is not None:
        chosen = survey.by_fraction(fraction, similarity)
        placement = f"fraction={fraction}"
    else:
        begins = survey.firsts(interval, first)
        chosen, skipped = survey.by_interval(interval, begins, similarity)
        placement = f"interval={interval}, first={' or '.join(map(str, sorted(set(begins.values()))))}"
    if similarity is not None:
        placement += ", by similarity"
    if not chosen:
        raise ReplearnError(_no_targets(model, stacks, placement, skipped))
    before, after = count_parameters(model, chosen)
    notes = []
    if any(stack.family == "generic" for stack in stacks):
        notes.append(
            "no family knows these blocks; they were found by the generic scan and are replaced by the "
            "whole-block operator, which saves parameters and optimizer state, not forward time"
        )
    return Plan(
        model=type(model).__name__,
        placement=placement,
        num_blocks=sum(len(stack) for stack in stacks),
        targets=tuple(chosen),
        skipped=tuple(skipped),
        parameters_before=before,
        parameters_after=after,
        notes=tuple(notes),
    )


def _no_targets(model: nn.Module, stacks: Sequence[Stack], placement: str, skipped: Sequence[Skipped]) -> str:
    """Why a placement came to nothing, and what would come to something."""
    text = f"This plan for {type(model).__name__} has no targets ({placement}): "
    if skipped:
        text += "; ".join(f"{entry.name} has to be kept ({entry.reason})" for entry in skipped[:3])
        text += f"; and {len(skipped) - 3} more. " if len(skipped) > 3 else ". "
    else:
        lengths = ", ".join(str(len(stack)) for stack in stacks)
        text += f"its stacks have {lengths} blocks, and a target needs a block on each side. "
    if max(len(stack) for stack in stacks) < 3:
        return text + "No block of it can be replaced: take a deeper model."
    return text + "Try a smaller interval, first=2, or another operator."


def _check_arguments(
    interval: Any, first: Any, fraction: Any, targets: Any, similarity: Any, operator: Any
) -> tuple[str, ...] | None:
    """Refuse what can't be meant; returns the named targets, if there are any."""
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
        if fraction is not None or similarity is not None or first is not None or interval != 4:
            raise ReplearnError(
                "targets already names the blocks; leave out interval, first, fraction and similarity."
            )
    if fraction is not None and (first is not None or interval != 4):
        raise ReplearnError("fraction places the targets itself; leave out interval and first.")
    if operator is not None and not isinstance(operator, Options):
        hint = f"{operator.__name__}()" if isinstance(operator, type) else "operators.Basic()"
        raise ReplearnError(
            f"operator={operator!r} is not an operator's options; write an instance from replearn.operators, "
            f"as {hint}."
        )
    return names


def count_parameters(model: nn.Module, targets: Sequence[Target]) -> tuple[int, int]:
    """Trainable parameters before and after, each shared tensor counted once."""
    gone = tuple(f"{target.name}." for target in targets)
    kept = {
        id(parameter): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not name.startswith(gone)
    }
    before = trainable(model.parameters())
    return before, trainable(kept.values()) + sum(target.parameters_after for target in targets)
