"""What a model costs in training, as data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields

from ..errors import ReplearnError
from ..planning.serialization import encode
from .machines import Machine
from .view import promise_table

STATES = {"sgd": 0, "sgd_momentum": 1, "lion": 1, "rmsprop": 1, "adagrad": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a block, an operator or a whole model in one training step.

    FLOPs are torch's: two for a multiply and add, elementwise work not counted. Synthesis (the making of an
    operator's weights, with its elementwise work) is counted apart, forward and backward together. Activations are
    what is kept for the backward pass, each storage once, without parameters and the batch itself. `seconds` is a
    roofline's, and 0 where no machine was named.
    """

    parameters: int = 0
    trainable: int = 0
    forward_flops: int = 0
    backward_flops: int = 0
    synthesis_flops: int = 0
    activation_bytes: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    seconds: float = 0.0

    @property
    def training_flops(self) -> int:
        """Forward and backward, with synthesis."""
        return self.forward_flops + self.backward_flops + self.synthesis_flops

    @property
    def memory_bytes(self) -> int:
        """Weights, gradients, optimizer state and activations added up.

        Gradients fill while activations drain, so that the peak of a step lies a little lower.
        """
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.activation_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(Cost)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(Cost)))


def total_of(costs: Iterable[Cost]) -> Cost:
    """All of them together."""
    whole = Cost()
    for cost in costs:
        whole = whole + cost
    return whole


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The cost of one block, or of the operator in its place."""

    name: str
    kind: str  # the block's class, or the operator's label
    cost: Cost


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The cost of a model, block by block; `rest` is the stem, the head and the loss.

    `peak_bytes` is the most that a training step holds at once, from a replay of its allocations. A GPU takes some
    more: workspaces of its libraries, and what the allocator can't split.
    """

    model: str
    blocks: tuple[BlockCost, ...]
    rest: Cost
    peak_bytes: int
    num_kernels: int

    @property
    def total(self) -> Cost:
        """Of all blocks and the rest."""
        return total_of([self.rest, *(block.cost for block in self.blocks)])

    def of(self, name: str) -> Cost:
        """The cost of the block with this name."""
        for block in self.blocks:
            if block.name == name:
                return block.cost
        raise ReplearnError(
            f"{self.model} has no block {name!r}; its blocks are {', '.join(block.name for block in self.blocks)}."
        )


@dataclass(frozen=True, slots=True)
class Promise:
    """What a plan is predicted to change; `print` shows a table. Without a plan, `after` is `before`."""

    before: ModelCost
    after: ModelCost
    precision: str
    optimizer: str
    machine: Machine | None = None

    def __str__(self) -> str:
        return promise_table(self)

    def ratio(self, quantity: str) -> float:
        """After over before, of a number of `Cost` (`memory_bytes`, `seconds`, ...) or of `peak_bytes`."""
        whole = quantity in ("peak_bytes", "num_kernels")
        before, after = (getattr(cost if whole else cost.total, quantity) for cost in (self.before, self.after))
        return float(after / before) if before else 1.0

    def to_json(self) -> str:
        """All of it as one line of JSON, totals included."""
        found = encode(self)
        for side in ("before", "after"):
            whole = getattr(self, side).total
            found[side]["total"] = {
                **encode(whole),
                "training_flops": whole.training_flops,
                "memory_bytes": whole.memory_bytes,
            }
        return json.dumps({"replearn_promise": 1, **found})


def optimizer_states(optimizer: str) -> int:
    """Numbers that an optimizer keeps for each trainable parameter."""
    if optimizer not in STATES:
        raise ReplearnError(f"optimizer={optimizer!r} is not known; write one of {', '.join(STATES)}.")
    return STATES[optimizer]
