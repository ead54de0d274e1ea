"""Which positions of a stack become targets: pure functions on numbers and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import ReplearnError
from .stacks import Stack


def by_interval(length: int, interval: int, first: int) -> list[int]:
    """The paper's positions r = first, first + K, ... up to the end of the stack (1-based)."""
    return list(range(first, length + 1, interval))


def edge_reason(stack: Stack, position: int) -> str:
    """Why a position can't be a target whatever the operator, or ''."""
    if position == 1:
        return "first block of its stack: it has no previous source"
    if position == len(stack):
        return "last block of its stack: it has no next source"
    if reason := stack.anatomies[position - 1].transition:
        return reason
    return ""


def evenly(legal: Mapping[str, Sequence[int]], count: int) -> dict[str, list[int]]:
    """Spread `count` targets over the legal positions of all stacks, never two adjacent.

    Stacks get shares in proportion to what they can hold; inside a stack the positions come as
    close to equal spacing as the legal ones allow.
    """
    capacity = {name: len(best_apart(dict.fromkeys(positions, 0.0), None)) for name, positions in legal.items()}
    total = sum(capacity.values())
    if count > total:
        raise ReplearnError(
            f"{count} targets were asked for, but at most {total} blocks can go: first and last blocks, blocks "
            "that change the shape, and neighbours of targets must stay. Ask for a smaller fraction."
        )
    share = {name: count * room / total for name, room in capacity.items()}
    given = {name: int(exact) for name, exact in share.items()}
    for name in sorted(share, key=lambda name: given[name] - share[name]):
        if sum(given.values()) < count and given[name] < capacity[name]:
            given[name] += 1
    return {name: _spread(legal[name], given[name]) for name in legal}


def _spread(positions: Sequence[int], count: int) -> list[int]:
    if not count:
        return []
    ordered = sorted(positions)
    low, high = ordered[0], ordered[-1]
    ideal = [low + (high - low) * (2 * i + 1) / (2 * count) for i in range(count)]
    # cost[i][p]: the least distance from the ideal with the i-th target at p
    cost = [{p: abs(p - ideal[0]) for p in ordered}]
    came: list[dict[int, int]] = [{}]
    for wanted in ideal[1:]:
        step: dict[int, float] = {}
        back: dict[int, int] = {}
        for p in ordered:
            before = [q for q in cost[-1] if q <= p - 2]
            if before:
                back[p] = min(before, key=lambda q: cost[-1][q])
                step[p] = cost[-1][back[p]] + abs(p - wanted)
        cost.append(step)
        came.append(back)
    chosen = [min(cost[-1], key=lambda p: cost[-1][p])]
    for back in reversed(came[1:]):
        chosen.append(back[chosen[-1]])
    return chosen[::-1]


def best_apart(scores: Mapping[int, float], count: int | None) -> list[int]:
    """The positions with the highest total score, no two adjacent: exactly `count`, or as many as fit."""
    ordered = sorted(scores)
    # states[i]: for each number of targets among the first i positions, the best choice
    states: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [])}]
    for i, position in enumerate(ordered):
        here = dict(states[-1])
        j = i
        while j > 0 and ordered[j - 1] >= position - 1:
            j -= 1
        for number, (score, chosen) in states[j].items():
            candidate = (score + scores[position], [*chosen, position])
            if number + 1 not in here or candidate[0] > here[number + 1][0]:
                here[number + 1] = candidate
        states.append(here)
    last = states[-1]
    wanted = max(last) if count is None else count
    if wanted not in last:
        raise ReplearnError(f"{count} targets do not fit; at most {max(last)} do.")
    return last[wanted][1]
