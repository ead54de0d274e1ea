"""Budgets as data: how much latency, FLOPs, memory or time is allowed, how many parameters, how many blocks go."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ReplearnError
from .data import Cost, count, duration, flops, size

BYTES = {"b": 1.0}
BYTES |= {f"{letter}b": 1000.0 ** (i + 1) for i, letter in enumerate("kmgt")}
BYTES |= {f"{letter}ib": 1024.0 ** (i + 1) for i, letter in enumerate("kmgt")}
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}

# by quantity: the field of a Cost, how a number of it is spelled, its units
QUANTITIES: dict[str, tuple[str, Callable[[float], str], Mapping[str, float]]] = {
    "latency": ("deployed_seconds", duration, SECONDS),
    "parameters": ("deployed_parameters", count, COUNTS),
    "flops": ("deployed_flops", flops, COUNTS),
    "memory": ("memory_bytes", size, BYTES),
    "activations": ("activation_bytes", size, BYTES),
    "time": ("seconds", duration, SECONDS),
    "blocks": ("blocks", count, COUNTS),
}
EXAMPLE = "'latency<=75%', 'parameters<=60%', 'flops<=70%', 'blocks=12', or for plan 'memory<=20GiB', 'time<=80%'"


@dataclass(frozen=True, slots=True)
class Budget:
    """An upper bound of a quantity: a share of the model's present value, or a number in the quantity's unit.

    `latency`, `parameters` and `flops` are those of a forward pass of the deployed model, as in `compress`.
    `memory` is the bytes of weights, gradients, optimizer state and activations in training, `activations` those
    of the last alone, `time` the seconds of a training step. `blocks` is the number of blocks to remove.
    """

    quantity: str
    at_most: float
    share: bool = True

    def __post_init__(self) -> None:
        if self.quantity not in QUANTITIES:
            raise ReplearnError(
                f"There is no budget of {self.quantity!r}, only of {', '.join(QUANTITIES)}; write {EXAMPLE}."
            )
        number = isinstance(self.at_most, (int, float)) and not isinstance(self.at_most, bool)
        if not number or not 0 < self.at_most < float("inf") or (self.share and self.at_most >= 1):
            wanted = "a share between 0 and 1, as 0.75" if self.share else "a number above 0"
            raise ReplearnError(f"Budget({self.quantity!r}, {self.at_most!r}, share={self.share}): give {wanted}.")

    def __str__(self) -> str:
        if self.quantity == "blocks":
            return f"blocks={self.at_most:.0f}"
        limit = f"{self.at_most * 100:.4g}%" if self.share else self.spell(self.at_most)
        return f"{self.quantity}<={limit}".replace(" ", "")

    def measure(self, cost: Cost) -> float:
        """The quantity's value in a cost."""
        return getattr(cost, QUANTITIES[self.quantity][0])

    def limit(self, before: Cost) -> float:
        """The largest value allowed, for a model with this cost now."""
        if self.quantity == "blocks":
            return before.blocks - self.at_most
        return self.at_most * self.measure(before) if self.share else self.at_most

    def met(self, cost: Cost, before: Cost) -> bool:
        """True if this cost is within the budget, for a model that costs `before` now."""
        return self.measure(cost) <= self.limit(before)

    def spell(self, number: float) -> str:
        """A value of this quantity as text."""
        return QUANTITIES[self.quantity][1](number)


def as_budgets(given: Budget | str | Sequence[Budget | str]) -> tuple[Budget, ...]:
    """A tuple of budgets from budgets or texts; all must be met.

    >>> [str(budget) for budget in as_budgets("memory<=75%, parameters<=60M")]
    ['memory<=75%', 'parameters<=60,000,000']
    """
    if isinstance(given, Budget):
        return (given,)
    if isinstance(given, str):
        return tuple(_read(part) for part in given.split(","))
    if not isinstance(given, Sequence) or not given:
        raise ReplearnError(f"budget={given!r}: write a budget, as {EXAMPLE}.")
    return tuple(dict.fromkeys(budget for item in given for budget in as_budgets(item)))


def _read(text: str) -> Budget:
    match = re.fullmatch(r"\s*([a-z]+)\s*(<?=)\s*(\d+\.?\d*(?:e[+-]?\d+)?)\s*([a-z%]*)\s*", text.lower())
    quantity, sign, number, unit = match.groups() if match else ("", "", "", "")
    if quantity not in QUANTITIES or (sign == "=") != (quantity == "blocks"):
        raise ReplearnError(f"budget={text.strip()!r} can't be read: write {EXAMPLE}.")
    if quantity == "blocks":
        if unit or not number.isdigit() or number == "0":
            raise ReplearnError(f"budget={text.strip()!r}: write a number of blocks from 1 on, as 'blocks=12'.")
        return Budget("blocks", int(number), share=False)
    if not float(number) or (unit == "%" and float(number) >= 100):
        raise ReplearnError(f"budget={text.strip()!r}: write a number above 0, and a share below 100%.")
    if unit == "%":
        return Budget(quantity, float(number) / 100)
    units = QUANTITIES[quantity][2]
    if unit not in units:
        known = ", ".join(unit for unit in units if unit)
        raise ReplearnError(f"budget={text.strip()!r} has no unit of {quantity}: write a % or one of {known}.")
    return Budget(quantity, float(number) * units[unit], share=False)
