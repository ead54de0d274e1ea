"""Which positions of a stack become targets: pure functions on numbers and names."""

from collections.abc import Mapping, Sequence

from ..blocks.stacks import Stack


def by_interval(length: int, interval: int, first: int) -> list[int]:
    """The paper's positions r = first, first + K, ... up to the end of the stack (1-based)."""
    return list(range(first, length + 1, interval))


def edge_reason(stack: Stack, position: int) -> str:
    """Why a position can't be a target whatever the operator, or ''."""
    if position == 1:
        return "first block of its stack: it has no previous source"
    if position == len(stack):
        return "last block of its stack: it has no next source"
    return stack.anatomies[position - 1].transition


def most_apart(positions: Sequence[int]) -> int:
    """How many of these positions can be taken with no two adjacent."""
    taken: list[int] = []
    for position in sorted(positions):
        if not taken or position > taken[-1] + 1:
            taken.append(position)
    return len(taken)


def evenly(legal: Mapping[str, Sequence[int]], count: int) -> dict[str, list[int]]:
    """Spread `count` targets (at least 1, and so many must fit) over all stacks, never two adjacent.

    Stacks get shares in proportion to what they can hold; inside a stack the positions come as
    close to equal spacing as the legal ones allow.
    """
    room = {name: most_apart(positions) for name, positions in legal.items()}
    total = sum(room.values())
    given = {name: count * holds // total for name, holds in room.items()}
    # the largest remainders get what is left over; sorted is stable, so earlier stacks come first
    by_remainder = sorted(room, key=lambda name: -(count * room[name] % total))
    for name in by_remainder[: count - sum(given.values())]:
        given[name] += 1
    return {name: _spread(positions, given[name]) for name, positions in legal.items()}


def _spread(positions: Sequence[int], count: int) -> list[int]:
    """The positions whose summed distance to `count` equal steps over the stack is least."""
    if not count:
        return []
    low, high = min(positions), max(positions)
    ideals = [low + (high - low) * (2 * i + 1) / (2 * count) for i in range(count)]
    return _cheapest_apart(sorted(positions), [{p: abs(p - ideal) for p in positions} for ideal in ideals])


def best_apart(names: Sequence[str], scores: Mapping[str, float], count: int) -> set[str]:
    """Those `count` of the scored names with the highest total score, no two adjacent; so many must fit.

    `names` are all blocks of all stacks; the ends of a stack are never scored, so stacks do not touch.
    """
    places = {place: -scores[name] for place, name in enumerate(names) if name in scores}
    return {names[place] for place in _cheapest_apart(sorted(places), [places] * count)}


def _cheapest_apart(positions: Sequence[int], costs: Sequence[Mapping[int, float]]) -> list[int]:
    """One position per cost table, ascending, no two adjacent, of the least total cost.

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
