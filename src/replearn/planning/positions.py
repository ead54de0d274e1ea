"""Which positions of a stack become targets: pure functions on numbers and names."""

from collections.abc import Mapping, Sequence

from ..blocks.stacks import Stack


def by_interval(length: int, interval: int, first: int) -> list[int]:
    """The paper's positions r = first, first + K, ... up to the end of the stack (1-based)."""
    return list(range(first, length + 1, interval))


def edge_reason(stack: Stack, position: int) -> str:
    """Why a position can't be a target of any operator; '' if it can."""
    if position == 1:
        return "first block of its stack: it has no previous source"
    if position == len(stack):
        return "last block of its stack: it has no next source"
    return stack.anatomies[position - 1].transition


def max_nonadjacent(positions: Sequence[int]) -> int:
    """The largest number of these positions of which no two are adjacent."""
    taken: list[int] = []
    for position in sorted(positions):
        if not taken or position > taken[-1] + 1:
            taken.append(position)
    return len(taken)


def evenly(legal: Mapping[str, Sequence[int]], count: int) -> dict[str, list[int]]:
    """Spread `count` targets over all stacks, no two adjacent; `count` is at least 1 and at most what fits.

    Each stack gets a share in proportion to its `max_nonadjacent`; within a stack the spacing is as even as the
    legal positions allow.
    """
    room = {name: max_nonadjacent(positions) for name, positions in legal.items()}
    total = sum(room.values())
    given = {name: count * holds // total for name, holds in room.items()}
    # what is left goes to the largest remainders; sorted is stable, so earlier stacks come first
    by_remainder = sorted(room, key=lambda name: -(count * room[name] % total))
    for name in by_remainder[: count - sum(given.values())]:
        given[name] += 1
    return {name: _spread(positions, given[name]) for name, positions in legal.items()}


def _spread(positions: Sequence[int], count: int) -> list[int]:
    """The positions with the least total distance to `count` evenly spaced points."""
    if not count:
        return []
    low, high = min(positions), max(positions)
    ideals = [low + (high - low) * (2 * i + 1) / (2 * count) for i in range(count)]
    return _cheapest_nonadjacent(sorted(positions), [{p: abs(p - ideal) for p in positions} for ideal in ideals])


def best_nonadjacent(names: Sequence[str], scores: Mapping[str, float], count: int) -> set[str]:
    """The `count` scored names with the highest total score, no two adjacent; that many must exist.

    `names` are all blocks of all stacks. The ends of a stack have no score, so blocks of two stacks are not
    adjacent.
    """
    places = {place: -scores[name] for place, name in enumerate(names) if name in scores}
    return {names[place] for place in _cheapest_nonadjacent(sorted(places), [places] * count)}


def _cheapest_nonadjacent(positions: Sequence[int], costs: Sequence[Mapping[int, float]]) -> list[int]:
    """One position for each cost table, ascending, no two adjacent, with the least total cost.

    Dynamic programming over the tables: `best[p]` is the cheapest choice so far that ends at p.
    """
    best: dict[int, tuple[float, list[int]]] = {}
    for step, cost in enumerate(costs):
        before = best
        best = {}
        cheapest: tuple[float, list[int]] | None = None if step else (0.0, [])
        waiting = sorted(before)
        for p in positions:
            while waiting and waiting[0] < p - 1:
                candidate = before[waiting.pop(0)]
                if cheapest is None or candidate[0] < cheapest[0]:
                    cheapest = candidate
            if cheapest is not None:
                best[p] = (cheapest[0] + cost[p], [*cheapest[1], p])
    return min(best.values(), key=lambda choice: choice[0])[1] if costs else []
