"""Room two: decide everything about a replacement, and touch nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from . import operators
from .anatomy import Anatomy, Part, resolve
from .errors import ReplearnError
from .operators.base import Operator, Site
from .operators.options import Need, Options
from .placement import best_apart, by_interval, edge_reason, evenly
from .plans import Plan, Read, Side, Skipped, Target
from .similarity import block_similarity
from .stacks import Stack, class_path, find_stacks
from .whole import refuse_wrapped


def plan(
    model: nn.Module,
    interval: int = 4,
    first: int | None = None,
    *,
    fraction: float | None = None,
    targets: Sequence[str] | None = None,
    similarity: Any = None,
    operator: Options | None = None,
) -> Plan:
    """Plan which blocks of a model to replace; the model stays bit-identical, and may be on meta.

    - `interval`, `first`: the paper's placement r = first, first + K, ... in every stack, with
      first = K unless given; `first=2` is the densest.
    - `fraction`: a share of all blocks, spread evenly, instead of an interval.
    - `targets`: the names of the blocks, instead of either.
    - `similarity`: a calibration batch; as many targets as the interval or the fraction gives, where
      a block's output is most like its input.
    - `operator`: options from `replearn.operators`; by default the paper's for the kind of block.

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
            "nn.ModuleList with at least three equal siblings. Give your block class a `replearn_anatomy`, or "
            "put the blocks into one nn.ModuleList."
        )
    _check_arguments(interval, first, fraction, targets, similarity, operator)
    survey = _Survey(model, stacks, operator)
    skipped: list[Skipped] = []
    if targets is not None:
        chosen = survey.named(targets)
        placement = "named targets"
    elif fraction is not None:
        chosen = survey.by_fraction(fraction, similarity)
        placement = f"fraction={fraction}"
    else:
        begin = interval if first is None else first
        chosen, skipped = survey.by_interval(interval, begin, similarity)
        placement = f"interval={interval}, first={begin}"
    if similarity is not None:
        placement += ", by similarity"
    if not chosen:
        longest = max(len(stack) for stack in stacks)
        raise ReplearnError(
            f"This plan for {type(model).__name__} has no targets ({placement}): its stacks have "
            f"{', '.join(str(len(stack)) for stack in stacks)} blocks, and a target needs a block on each side. "
            + (
                "Try a smaller interval, or first=2."
                if longest > 2
                else "No block of it can be replaced: take a deeper model."
            )
        )
    before, after = _count(model, chosen)
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


def _check_arguments(
    interval: Any, first: Any, fraction: Any, targets: Any, similarity: Any, operator: Any
) -> None:
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
    if targets is not None and (isinstance(targets, str) or not all(isinstance(name, str) for name in targets)):
        raise ReplearnError(f"targets={targets!r}: write a list of block names, as ['layer3.3'].")
    if targets is not None and (fraction is not None or similarity is not None):
        raise ReplearnError("targets already names the blocks; leave out fraction and similarity.")
    if fraction is not None and first is not None:
        raise ReplearnError("fraction places the targets itself; leave out first.")
    if operator is not None and not isinstance(operator, Options):
        hint = f"{operator.__name__}()" if isinstance(operator, type) else "operators.Basic()"
        raise ReplearnError(
            f"operator={operator!r} is not an operator's options; write an instance from replearn.operators, "
            f"as {hint}."
        )


class _Survey:
    """The stacks of one model, with the legality of every position worked out once."""

    def __init__(self, model: nn.Module, stacks: tuple[Stack, ...], operator: Options | None) -> None:
        self.model = model
        self.stacks = stacks
        self.operator = operator
        self._found: dict[str, Target | str] = {}
        places: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            places.setdefault(id(module), []).append(name)
        self._places = places

    def target(self, stack: Stack, position: int) -> Target | str:
        """The target at this position, or the reason why the block has to be kept."""
        name = stack.blocks[position - 1]
        if name not in self._found:
            self._found[name] = edge_reason(stack, position) or self._build(stack, position)
        return self._found[name]

    def _build(self, stack: Stack, position: int) -> Target | str:
        name = stack.blocks[position - 1]
        block = self.model.get_submodule(name)
        places = [place for place in self._places[id(block)] if place != name]
        if places:
            return f"the same module is also registered as {places[0]}"
        if has_hooks(block):
            return "it has hooks, which would be lost with it; remove them, or keep the block"
        notes: list[str] = []
        options = self.operator or default_operator(stack.anatomies[position - 1])
        try:
            return build_target(self.model, stack, position, options)
        except ReplearnError as error:
            if self.operator is not None or options.name == "whole_block":
                return str(error)
            notes.append(f"{options.name} does not fit ({error}), so the whole-block operator is used")
        try:
            found = build_target(self.model, stack, position, operators.WholeBlock())
        except ReplearnError as error:
            return str(error)
        return replace(found, notes=(*notes, *found.notes))

    def legal(self, stack: Stack) -> list[int]:
        return [p for p in range(1, len(stack) + 1) if isinstance(self.target(stack, p), Target)]

    def at(self, stack: Stack, positions: Iterable[int]) -> list[Target]:
        found = (self.target(stack, position) for position in positions)
        return [target for target in found if isinstance(target, Target)]

    def by_interval(self, interval: int, first: int, similarity: Any) -> tuple[list[Target], list[Skipped]]:
        chosen: list[Target] = []
        skipped: list[Skipped] = []
        scores = {} if similarity is None else self.scores(similarity)
        for stack in self.stacks:
            positions = by_interval(len(stack), interval, first)
            reasons = {p: found for p in positions if isinstance(found := self.target(stack, p), str)}
            if similarity is None:
                skipped += [Skipped(stack.blocks[p - 1], p, reason) for p, reason in reasons.items()]
                chosen += self.at(stack, positions)
            else:
                legal = {p: scores[stack.blocks[p - 1]] for p in self.legal(stack)}
                chosen += self.at(stack, best_apart(legal, len(positions) - len(reasons)))
        return chosen, skipped

    def by_fraction(self, fraction: float, similarity: Any) -> list[Target]:
        total = sum(len(stack) for stack in self.stacks)
        count = max(1, round(fraction * total))
        legal = {stack.name: self.legal(stack) for stack in self.stacks}
        spread = evenly(legal, count)
        if similarity is not None:
            scores = self.scores(similarity)
            for stack in self.stacks:
                choice = {p: scores[stack.blocks[p - 1]] for p in legal[stack.name]}
                spread[stack.name] = best_apart(choice, len(spread[stack.name]))
        return [target for stack in self.stacks for target in self.at(stack, spread[stack.name])]

    def named(self, names: Sequence[str]) -> list[Target]:
        where = {name: (stack, i + 1) for stack in self.stacks for i, name in enumerate(stack.blocks)}
        for name in names:
            if name not in where:
                known = ", ".join(f"{stack.name} ({len(stack)} blocks)" for stack in self.stacks)
                raise ReplearnError(f"{name!r} is not a block of a stack of this model. Its stacks are: {known}.")
        chosen: dict[str, Target] = {}
        for name in sorted(set(names), key=list(where).index):
            stack, position = where[name]
            found = self.target(stack, position)
            if isinstance(found, str):
                raise ReplearnError(f"{name} (position {position} of {stack.name}) can't be replaced: {found}.")
            if found.previous in chosen:
                raise ReplearnError(
                    f"{found.previous} and {name} are adjacent, and a target's neighbours must stay. Drop one."
                )
            chosen[name] = found
        return list(chosen.values())

    def scores(self, batch: Any) -> dict[str, float]:
        names = {
            name: anatomy
            for stack in self.stacks
            for name, anatomy in zip(stack.blocks, stack.anatomies, strict=True)
        }
        return block_similarity(self.model, names, batch)


def default_operator(anatomy: Anatomy) -> Options:
    """The paper's operator for this kind of block."""
    for options in operators.available().values():
        if options.default_for == anatomy.kind:
            return options()
    raise ReplearnError(f"There is no default operator for blocks of kind {anatomy.kind!r}.")


def build_target(model: nn.Module, stack: Stack, position: int, options: Options) -> Target:
    """The target at a legal position, or a ReplearnError that says why the operator does not fit."""
    anatomy = stack.anatomies[position - 1]
    name, previous, following = (stack.blocks[position - 1 + offset] for offset in (0, -1, 1))
    if anatomy.kind not in options.kinds:
        raise ReplearnError(
            f"the operator {options.name!r} suits {', '.join(options.kinds)} blocks, and this is a "
            f"{anatomy.kind} block ({stack.block_type})"
        )
    block = model.get_submodule(name)
    neighbours: dict[Side, tuple[nn.Module, Anatomy]] = {
        "previous": (model.get_submodule(previous), stack.anatomies[position - 2]),
        "next": (model.get_submodule(following), stack.anatomies[position]),
    }
    reads: list[Read] = []
    notes: list[str] = []
    for need in expand(options.needs(anatomy), block):
        found, note = settle(need, anatomy, block, neighbours, options)
        reads += found
        notes += note
    target = Target(
        name=name,
        stack=stack.name,
        position=position,
        previous=previous,
        next=following,
        block_type=class_path(block),
        anatomy=anatomy,
        operator=options,
        reads=tuple(reads),
        parameters_before=trainable(block.parameters()),
        parameters_after=0,
        notes=tuple(dict.fromkeys(notes)),
    )
    built = build_operator(model, target, torch.device("meta"))
    return replace(target, parameters_after=trainable(built.parameters()))


def build_operator(model: nn.Module, target: Target, device: torch.device) -> Operator:
    """Build a target's operator next to the model's own neighbours; the model is not touched."""
    block, previous, following = (
        model.get_submodule(name) for name in (target.name, target.previous, target.next)
    )
    return target.operator.module(Site(target, block, previous, following, device))


def expand(needs: tuple[Need, ...], block: nn.Module) -> Iterable[Need]:
    """The need `*` stands for every parameter of the block."""
    for need in needs:
        if need.role != "*":
            yield need
            continue
        for name, _ in block.named_parameters(remove_duplicate=False):
            yield Need(name, previous=name, next=name, like=name, by_path=True)


def settle(
    need: Need,
    anatomy: Anatomy,
    block: nn.Module,
    neighbours: dict[Side, tuple[nn.Module, Anatomy]],
    options: Options,
) -> tuple[list[Read], list[str]]:
    """Decide where a weight is read: where it fits, else from the other source."""
    shape = shape_of(block, part_of(anatomy, need, need.like))
    fits: dict[Side, Part] = {}
    misfits: dict[Side, str] = {}
    for side in options.sides:
        neighbour, theirs = neighbours[side]
        part = part_of(theirs, need, need.previous if side == "previous" else need.next)
        found = shape_of(neighbour, part)
        if found is not None and found == shape:
            fits[side] = part
        else:
            misfits[side] = f"{side} {part.path} is {found}, not {shape}"
    if not options.sides:
        return [], []
    if not fits:
        raise ReplearnError(f"no source fits its {need.like}: {'; '.join(misfits.values())}")
    notes = [
        f"{need.role} comes from the {side} source alone ({reason})"
        for side in fits
        for other, reason in misfits.items()
        if side != other and (need.mix or need.prefer == other)
    ]
    if need.mix:
        return [Read(need.role, side, part) for side, part in fits.items()], notes
    side = need.prefer if need.prefer in fits else next(iter(fits))
    return [Read(need.role, side, fits[side])], notes


def part_of(anatomy: Anatomy, need: Need, role: str) -> Part:
    if need.by_path:
        return Part(role)
    if role not in anatomy.parts:
        raise ReplearnError(f"this {anatomy.family} block has no {role}, which the operator reads")
    return anatomy.parts[role]


def shape_of(block: nn.Module, part: Part) -> tuple[int, ...] | None:
    """The shape of a part's weight as (out, in, ...); for a norm, of all its parameters."""
    try:
        found = resolve(block, part.path)
    except AttributeError:
        return None
    if isinstance(found, nn.Module):
        weight = getattr(found, "weight", None)
        found = weight if weight is not None else torch.empty(0)
    shape = tuple(found.shape)
    shape = shape[::-1] if part.transposed else shape
    return shape if part.rows is None else (part.rows[1] - part.rows[0], *shape[1:])


def has_hooks(block: nn.Module) -> bool:
    """Does anything hang on the block's own calls? Hooks further inside are part of the block."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(block, name) for name in names)


def trainable(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def _count(model: nn.Module, targets: Sequence[Target]) -> tuple[int, int]:
    """Trainable parameters before and after, each shared tensor counted once."""
    gone = tuple(f"{target.name}." for target in targets)
    kept = {
        id(parameter): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not name.startswith(gone)
    }
    before = trainable(model.parameters())
    return before, trainable(kept.values()) + sum(target.parameters_after for target in targets)
