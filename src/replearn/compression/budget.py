"""What compress is asked for: a share of latency, parameters or FLOPs, a number of blocks, a plan, or names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ReplearnError
from ..planning.data import Plan

Quantity = Literal["latency", "parameters", "flops", "blocks"]
EXAMPLES = "'latency<=75%', 'parameters<=60%', 'flops<=70%', 'blocks=12', a Plan or a list of block names"


@dataclass(frozen=True, slots=True)
class Goal:
    """At most this share of a quantity, or this many blocks out; or the blocks themselves."""

    quantity: Quantity = "blocks"
    share: float = 1.0
    blocks: int = 0
    names: tuple[str, ...] = ()
    removal: frozenset[str] = frozenset()  # of the names: those that a plan wants nothing for

    def __str__(self) -> str:
        if self.names:
            return f"{len(self.names)} named blocks"
        return f"blocks={self.blocks}" if self.quantity == "blocks" else f"{self.quantity}<={self.share:.4g}"


def read_budget(given: Any) -> Goal:
    """A budget from what the user wrote; ReplearnError says how to write one."""
    if isinstance(given, Plan):
        bare = frozenset(target.name for target in given.targets if target.operator.name == "removal")
        return Goal(names=tuple(target.name for target in given.targets), removal=bare)
    if isinstance(given, str):
        return _parse(given)
    if isinstance(given, Sequence) and given and all(isinstance(name, str) for name in given):
        if len(set(given)) < len(given):
            raise ReplearnError(f"budget={list(given)!r} names a block twice; a block goes once.")
        return Goal(names=tuple(given))
    raise ReplearnError(f"budget={given!r} can't be read: write {EXAMPLES}.")


def _parse(text: str) -> Goal:
    number = re.fullmatch(r"\s*blocks\s*=\s*(\d+)\s*", text)
    if number:
        if int(number[1]) < 1:
            raise ReplearnError(f"budget={text!r}: at least one block goes; write 'blocks=1'.")
        return Goal(blocks=int(number[1]))
    share = re.fullmatch(r"\s*([a-z]+)\s*<=\s*(\d+(?:\.\d+)?)\s*%\s*", text.lower())
    if share is None or share[1] not in ("latency", "parameters", "flops"):
        raise ReplearnError(f"budget={text!r} can't be read: write {EXAMPLES}.")
    part = float(share[2]) / 100
    if not 0 < part < 1:
        raise ReplearnError(f"budget={text!r}: write a share between 0% and 100%, as 'latency<=75%'.")
    quantity = next(known for known in get_args(Quantity) if known == share[1])
    return Goal(quantity, part)
