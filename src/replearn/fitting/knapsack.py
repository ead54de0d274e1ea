"""Choose what to take for the least damage that saves enough, with no two neighbours: numbers in, numbers out.

Dynamic programming over the items of each stack. A state is a damage and what it saves; of two states that may go
on alike, one that saves no more and damages no less is dropped. What is left grows with the number of distinct
savings, which is small for models of repeated blocks. Where it is not, savings are rounded down to a grid: the
choice may then miss the optimum by a hair, and still never misses the need.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_STATES = 4000
GRID = 1000


@dataclass(frozen=True, slots=True)
class Item:
    """Something to take: its position in its stack, the damage it does, and what it saves of each need."""

    position: int
    damage: float
    saves: tuple[float, ...]


class State(NamedTuple):
    damage: float
    saved: tuple[float, ...]
    last: int  # the position taken last in this stack
    taken: tuple[tuple[int, int], ...]  # (stack, index of the item)


def choose(
    stacks: Sequence[Sequence[Item]], needs: Sequence[float], most_states: int = MOST_STATES
) -> list[tuple[int, int]] | None:
    """The (stack, item) pairs of least total damage whose savings reach every need; None if none do."""
    if any(most_saved(stacks, i)[0] < need for i, need in enumerate(needs)):
        return None
    for grid in (GRID, 100 * GRID):
        found, exact = _choose(stacks, needs, most_states, grid)
        if found is not None or exact:
            return found
    # the grid hides a choice that just suffices, if there is one: only looking at all of them can tell
    return _choose(stacks, needs, sys.maxsize, GRID)[0]


def _choose(
    stacks: Sequence[Sequence[Item]], needs: Sequence[float], most_states: int, grid: int
) -> tuple[list[tuple[int, int]] | None, bool]:
    """The choice, and whether no saving had to be rounded on the way."""
    exact = True
    # what is saved beyond a need is worth nothing, unless a later item may cost some of it again
    negative = [any(item.saves[i] < 0 for items in stacks for item in items) for i in range(len(needs))]
    caps = [float("inf") if below else need for below, need in zip(negative, needs, strict=True)]
    states = [State(0.0, tuple(0.0 for _ in needs), NEVER, ())]
    for stack, items in enumerate(stacks):
        states = [s._replace(last=NEVER) for s in states]
        for index in sorted(range(len(items)), key=lambda i: items[i].position):
            item = items[index]
            more = [
                State(
                    s.damage + item.damage,
                    tuple(min(a + b, cap) for a, b, cap in zip(s.saved, item.saves, caps, strict=True)),
                    item.position,
                    (*s.taken, (stack, index)),
                )
                for s in states
                if s.last < item.position - 1
            ]
            states = _front([*states, *more], item.position)
            if len(states) > most_states:
                exact = False
                states = _front([_rounded(s, needs, grid) for s in states], item.position)
    enough = [s for s in states if all(a >= need for a, need in zip(s.saved, needs, strict=True))]
    return (list(min(enough, key=lambda s: s.damage).taken) if enough else None), exact


NEVER = -2


def _rounded(state: State, needs: Sequence[float], grid: int) -> State:
    """Savings rounded down to a grid; a need that is met is not unmet by it."""
    units = [abs(need) / grid or 1.0 for need in needs]
    saved = (
        max((a // unit) * unit, need) if a >= need else (a // unit) * unit
        for a, unit, need in zip(state.saved, units, needs, strict=True)
    )
    return state._replace(saved=tuple(saved))


def _front(states: Sequence[State], position: int) -> list[State]:
    """Drop states that another one beats; one that has just taken a neighbour beats none that has not."""
    free: list[State] = []
    blocked: list[State] = []
    best_free = best_blocked = float("-inf")
    # a state can only be beaten by one that comes before it in this order
    for state in sorted(states, key=lambda s: (s.damage, tuple(-a for a in s.saved), s.last)):
        is_blocked = state.last == position
        if len(state.saved) == 1:  # one need: what was saved so far at less damage is all there is to compare
            saved = state.saved[0]
            if saved <= best_free or (is_blocked and saved <= best_blocked):
                continue
            best_free, best_blocked = (best_free, saved) if is_blocked else (saved, best_blocked)
        elif _covered(state, free) or (is_blocked and _covered(state, blocked)):
            continue
        (blocked if is_blocked else free).append(state)
    return free + blocked


def _covered(state: State, others: Sequence[State]) -> bool:
    return any(all(a >= b for a, b in zip(other.saved, state.saved, strict=True)) for other in others)


def most_saved(stacks: Sequence[Sequence[Item]], which: int) -> tuple[float, int]:
    """The most that can be saved of one need, and how many items that takes."""
    rows = [[Item(item.position, -item.saves[which], ()) for item in items] for items in stacks]
    taken = _choose(rows, (), MOST_STATES, GRID)[0] or []
    return sum(stacks[stack][index].saves[which] for stack, index in taken), len(taken)
