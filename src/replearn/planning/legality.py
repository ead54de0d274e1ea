"""Which positions of a model's stacks can be targets, and which of them a placement takes."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from torch import nn

from .. import operators
from ..blocks.dataflow import find_use
from ..blocks.stacks import Stack
from ..errors import ReplearnError
from ..operators._base.options import Options
from .data import Skipped, Target
from .positions import by_interval, edge_reason, evenly, max_nonadjacent
from .targets import build_target, default_operator, has_hooks

MAX_SHARE = 0.9  # of its block's parameters: a deployed operator with more is said to save nothing


class Survey:
    """The stacks of one model; whether a position can be a target is worked out once."""

    def __init__(self, model: nn.Module, stacks: tuple[Stack, ...], operator: Options | None) -> None:
        self.model = model
        self.stacks = stacks
        self.operator = operator
        self.places = {name: (stack, i + 1) for stack in stacks for i, name in enumerate(stack.blocks)}
        self._targets: dict[str, Target | str] = {}
        self._reads: dict[str, dict[str, str]] = {}
        self._registered = defaultdict[int, list[str]](list)
        for name, module in model.named_modules(remove_duplicate=False):
            self._registered[id(module)].append(name)

    def target(self, stack: Stack, position: int) -> Target | str:
        """The target at this position, or the reason why the block can't be replaced."""
        name = stack.blocks[position - 1]
        if name not in self._targets:
            self._targets[name] = edge_reason(stack, position) or self._build(stack, position)
        return self._targets[name]

    def _build(self, stack: Stack, position: int) -> Target | str:
        name = stack.blocks[position - 1]
        block = self.model.get_submodule(name)
        elsewhere = [place for place in self._registered[id(block)] if place != name]
        if elsewhere:
            return f"the same module is also registered as {elsewhere[0]}"
        if has_hooks(block):
            return "it has hooks, which would be lost with it; remove them, or keep the block"
        if name in (reads := self._reads_of(stack)):
            return f"the code around it reads {name}.{reads[name]}, which an operator does not have"
        options = self.operator or default_operator(stack.anatomies[position - 1])
        try:
            return build_target(self.model, stack, position, options)
        except ReplearnError as error:
            misfit = str(error)
        if self.operator is not None or options.name == "whole_block":
            return misfit
        try:
            found = build_target(self.model, stack, position, operators.WholeBlock())
        except ReplearnError as error:
            return str(error)
        note = f"{options.name} does not fit ({misfit}), so the whole-block operator is used"
        return replace(found, notes=(note, *found.notes))

    def _reads_of(self, stack: Stack) -> dict[str, str]:
        """By block of a stack: a part of it that the code around it reads, in train or eval mode."""
        if stack.name not in self._reads:
            uses = [find_use(self.model, stack.blocks, training) for training in (False, True)]
            self._reads[stack.name] = {block: part for use in uses if use for block, part in use.reads.items()}
        return self._reads[stack.name]

    def legal(self, stack: Stack) -> list[int]:
        return [p for p in range(1, len(stack) + 1) if isinstance(self.target(stack, p), Target)]

    def at(self, stack: Stack, positions: Iterable[int]) -> list[Target]:
        found = (self.target(stack, position) for position in positions)
        return [target for target in found if isinstance(target, Target)]

    def first_positions(self, interval: int, first: int | None) -> dict[str, int]:
        """The first target of each stack: as given, else the interval, or 2 if that gives more than one target."""
        if first is not None:
            return {stack.name: first for stack in self.stacks}

        def count(stack: Stack, begin: int) -> int:
            return len(self.at(stack, by_interval(len(stack), interval, begin)))

        return {
            stack.name: 2 if count(stack, interval) <= 1 and count(stack, 2) > count(stack, interval) else interval
            for stack in self.stacks
        }

    def by_interval(self, interval: int, first_positions: Mapping[str, int]) -> tuple[list[Target], list[Skipped]]:
        """Every interval-th block of each stack, and those of them that can't be replaced."""
        chosen: list[Target] = []
        skipped: list[Skipped] = []
        for stack in self.stacks:
            positions = by_interval(len(stack), interval, first_positions[stack.name])
            chosen += self.at(stack, positions)
            for position in positions:
                if isinstance(reason := self.target(stack, position), str):
                    skipped.append(Skipped(stack.blocks[position - 1], position, reason))
        return chosen, skipped

    def by_fraction(self, fraction: float) -> list[Target]:
        """This fraction of all blocks, spread evenly."""
        total, most = len(self.places), self.most()
        count = max(1, round(fraction * total))
        if count > most:
            cure = f"Ask for fraction={most / total:.6g} or less." if most else self.cure(self.places)
            raise ReplearnError(
                f"fraction={fraction} is {count} of {total} blocks, and at most {most} can go, because a target's "
                f"neighbours must stay. Blocks that can't go: {self._reasons()}. {cure}".rstrip()
            )
        return self.spread(count)

    def cure(self, names: Iterable[str]) -> str:
        """The operators that fit those of these blocks that only the one asked for does not, as a sentence."""
        usual = Survey(self.model, self.stacks, None)
        found = [usual.target(*self.places[name]) for name in names]
        fitting = dict.fromkeys(repr(each.operator.name) for each in found if isinstance(each, Target))
        return f"Try operator={' or '.join(fitting)}." if fitting else ""

    def most(self) -> int:
        """The largest number of targets."""
        return sum(max_nonadjacent(self.legal(stack)) for stack in self.stacks)

    def spread(self, count: int) -> list[Target]:
        """`count` targets, spread evenly over all stacks."""
        places = evenly({stack.name: self.legal(stack) for stack in self.stacks}, count)
        return [target for stack in self.stacks for target in self.at(stack, places[stack.name])]

    def notes(self, chosen: Sequence[Target]) -> tuple[str, ...]:
        """Notes on the plan as a whole."""
        heavy = [target for target in chosen if not self._saves(target)]
        notes = (self._heavy_note(heavy),) if heavy else ()
        generic = "no family knows these blocks; they were found by the generic scan"
        return (*notes, generic) if any(stack.family == "generic" for stack in self.stacks) else notes

    def _heavy_note(self, heavy: Sequence[Target]) -> str:
        """That these operators save nothing once deployed, and which one does."""
        stack, position = self.places[heavy[0].name]
        others = []
        for options in operators.available().values():
            with suppress(ReplearnError):
                others.append(build_target(self.model, stack, position, options()))
        lighter = max(
            filter(self._saves, others), key=lambda target: target.parameters_deployed or 0, default=None
        )
        labels = ", ".join(dict.fromkeys(target.operator.name for target in heavy))
        other = f"operator={lighter.operator.name!r} does, and so does" if lighter else "use"
        return (
            f"{labels} saves parameters, gradients and optimizer state while training, and nothing once deployed; "
            f"{other} replearn.compress"
        )

    def _saves(self, target: Target) -> bool:
        block = sum(parameter.numel() for parameter in self.model.get_submodule(target.name).parameters())
        return (target.parameters_deployed or 0) < MAX_SHARE * block

    def _reasons(self, shown: int = 4) -> str:
        """The first few blocks that can't be replaced, with the reason of each."""
        kept = [
            f"{name} ({reason})"
            for name, (stack, position) in self.places.items()
            if isinstance(reason := self.target(stack, position), str)
        ]
        return "; ".join(kept[:shown]) + (f"; and {len(kept) - shown} more" if len(kept) > shown else "")

    def named(self, names: Sequence[str]) -> list[Target]:
        """The targets with these names, in the model's order."""
        for name in names:
            if name not in self.places:
                known = ", ".join(f"{stack.blocks[0]} to {stack.blocks[-1]}" for stack in self.stacks)
                raise ReplearnError(f"{name!r} is not a block of a stack of this model. Its stacks are: {known}.")
        order = list(self.places)
        chosen: dict[str, Target] = {}
        for name in sorted(set(names), key=order.index):
            stack, position = self.places[name]
            found = self.target(stack, position)
            if isinstance(found, str):
                raise ReplearnError(
                    f"{name} (position {position} of {len(stack)}) can't be replaced: {found}. "
                    f"{self.cure([name]) or 'Leave it out.'}"
                )
            if found.previous in chosen:
                raise ReplearnError(
                    f"{found.previous} and {name} are adjacent, and a target's neighbours must stay. Drop one."
                )
            chosen[name] = found
        return list(chosen.values())
