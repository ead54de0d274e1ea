"""Budgets as data: how much memory, time, FLOPs or how many parameters training may take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ReplearnError
from .data import Cost
from .view import count, duration, flops, size

Quantity = Literal["memory", "activations", "time", "parameters", "flops"]
FIELDS = {
    "memory": "memory_bytes",
    "activations": "activation_bytes",
    "time": "seconds",
    "parameters": "trainable",
    "flops": "training_flops",
}
SPELLED = {"memory": size, "activations": size, "time": duration, "parameters": count, "flops": flops}
BYTES = {"b": 1.0}
BYTES |= {f"{letter}b": 1000.0 ** (i + 1) for i, letter in enumerate("kmgt")}
BYTES |= {f"{letter}ib": 1024.0 ** (i + 1) for i, letter in enumerate("kmgt")}
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
UNITS = {
    "memory": BYTES,
    "activations": BYTES,
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
    "parameters": COUNTS,
    "flops": COUNTS,
}
EXAMPLE = "memory<=75%, time<=80%, parameters<=60M, memory<=20GiB, time<=150ms or flops<=2T"


@dataclass(frozen=True, slots=True)
class Budget:
    """At most so much of a quantity: a share of what the model takes now, or a number in its own unit.

    `memory` is what training holds, in bytes (weights, gradients, optimizer state and activations added up),
    `activations` its last part alone, `time` a step's seconds, `parameters` the trainable ones,
    `flops` those of a training step.
    """

    quantity: Quantity
    at_most: float
    share: bool = True

    def __post_init__(self) -> None:
        if self.quantity not in get_args(Quantity):
            raise ReplearnError(
                f"There is no budget of {self.quantity!r}, only of {', '.join(get_args(Quantity))}; write "
                f"{EXAMPLE}."
            )
        number = isinstance(self.at_most, (int, float)) and not isinstance(self.at_most, bool)
        if not number or not 0 < self.at_most < float("inf") or (self.share and self.at_most >= 1):
            wanted = "a share between 0 and 1, as 0.75" if self.share else "a number above 0"
            raise ReplearnError(f"Budget({self.quantity!r}, {self.at_most!r}, share={self.share}): give {wanted}.")

    def __str__(self) -> str:
        limit = f"{self.at_most * 100:.4g}%" if self.share else SPELLED[self.quantity](self.at_most)
        return f"{self.quantity}<={limit}".replace(" ", "")

    def measure(self, cost: Cost) -> float:
        """The quantity's number in a cost."""
        return float(getattr(cost, FIELDS[self.quantity]))

    def limit(self, before: Cost) -> float:
        """The most that is allowed, for a model that costs this much now."""
        return self.at_most * self.measure(before) if self.share else self.at_most

    def spell(self, number: float) -> str:
        """A number of this quantity as text."""
        return str(SPELLED[self.quantity](number))


def as_budgets(given: Budget | str | Sequence[Budget | str]) -> tuple[Budget, ...]:
    """Budgets from budgets or texts, of which all must be met.

    >>> [str(budget) for budget in as_budgets("memory<=75%, parameters<=60M")]
    ['memory<=75%', 'parameters<=60,000,000']
    """
    if isinstance(given, Budget):
        return (given,)
    if isinstance(given, str):
        return tuple(_read(part) for part in given.split(","))
    if not isinstance(given, Sequence) or not given:
        raise ReplearnError(f"budget={given!r}: write a budget, as {EXAMPLE}.")
    found = tuple(budget for item in given for budget in as_budgets(item))
    return tuple(dict.fromkeys(found))


def _read(text: str) -> Budget:
    match = re.fullmatch(r"\s*([a-z]+)\s*<=\s*([0-9.]+(?:e[+-]?\d+)?)\s*([a-z%]*)\s*", text.lower())
    quantity = match[1] if match else ""
    if match is None or quantity not in UNITS:
        raise ReplearnError(f"The budget {text.strip()!r} can't be read: write {EXAMPLE}.")
    try:
        number = float(match[2])
    except ValueError:
        raise ReplearnError(f"The budget {text.strip()!r} can't be read: {match[2]} is no number.") from None
    if match[3] == "%":
        return Budget(_quantity(quantity), number / 100)
    units = UNITS[quantity]
    if match[3] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise ReplearnError(f"The budget {text.strip()!r} has no unit of {quantity}: write a % or one of {known}.")
    return Budget(_quantity(quantity), number * units[match[3]], share=False)


def _quantity(name: str) -> Quantity:
    for known in get_args(Quantity):
        if name == known:
            quantity: Quantity = known
            return quantity
    raise ReplearnError(f"A budget of {name!r}: the quantities are {', '.join(get_args(Quantity))}.")
