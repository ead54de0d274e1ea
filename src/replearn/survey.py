"""Which positions of a model's stacks can be targets, and which of them a placement takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from . import operators
from .errors import ReplearnError
from .operators.options import Options
from .placement import best_apart, by_interval, edge_reason, evenly
from .plans import Skipped, Target
from .similarity import block_similarity
from .stacks import Stack
from .targets import build_target, default_operator, has_hooks


class Survey:
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
