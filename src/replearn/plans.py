"""The plan: plain, frozen data that says which blocks go and what stands in their place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .anatomy import Anatomy, Part
from .errors import ReplearnError
from .operators.options import Options, options_from_dict
from .table import plan_table

Side = Literal["previous", "next"]
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Read:
    """One tensor (or small module) that an operator reads from a neighbour."""

    role: str
    side: Side
    part: Part


@dataclass(frozen=True, slots=True)
class Target:
    """One block that is removed, and everything needed to build what replaces it."""

    name: str  # the module's name in the model: layer3.3
    stack: str
    position: int  # the paper's, 1-based in its stack
    previous: str
    next: str
    block_type: str
    anatomy: Anatomy
    operator: Options
    reads: tuple[Read, ...]
    parameters_before: int  # of the block
    parameters_after: int  # of the operator
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Skipped:
    """A block that the placement came to and that had to be kept."""

    name: str
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Which targets, which sources, which operators, and what the model will have after it.

    `print(plan)` shows a table; `to_json` and `from_json` round-trip exactly. Parameters are
    counted as optimizers count them: trainable, each shared tensor once.
    """

    model: str
    placement: str
    num_blocks: int
    targets: tuple[Target, ...]
    skipped: tuple[Skipped, ...]
    parameters_before: int
    parameters_after: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return plan_table(self)

    def to_json(self) -> str:
        return json.dumps({"replearn_plan": FORMAT, **asdict(self), "targets": _targets_out(self.targets)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back; raises ReplearnError for anything that is not one."""
        try:
            data = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ReplearnError(f"This is not a plan: it is not JSON ({error}).") from error
        if not isinstance(data, dict) or "replearn_plan" not in data:
            raise ReplearnError("This is not a plan: JSON without the key 'replearn_plan'.")
        version = data.pop("replearn_plan")
        if version != FORMAT:
            raise ReplearnError(
                f"The plan has format {version!r}; this version of replearn reads {FORMAT}. "
                "Read it with the version that wrote it."
            )
        try:
            targets = tuple(_target_in(target) for target in data.pop("targets"))
            skipped = tuple(Skipped(**entry) for entry in data.pop("skipped"))
            notes = tuple(data.pop("notes"))
            return cls(targets=targets, skipped=skipped, notes=notes, **data)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ReplearnError(f"This is a damaged plan: {error}.") from error


def _targets_out(targets: tuple[Target, ...]) -> list[dict[str, Any]]:
    return [{**asdict(target), "operator": target.operator.to_dict()} for target in targets]


def _target_in(data: Mapping[str, Any]) -> Target:
    data = dict(data)
    anatomy = dict(data.pop("anatomy"))
    parts = {role: _part_in(part) for role, part in anatomy.pop("parts").items()}
    reads = tuple(
        Read(entry["role"], _side(entry["side"]), _part_in(entry["part"])) for entry in data.pop("reads")
    )
    operator = options_from_dict(data.pop("operator"))
    notes = tuple(data.pop("notes"))
    return Target(anatomy=Anatomy(parts=parts, **anatomy), operator=operator, reads=reads, notes=notes, **data)


def _part_in(data: Mapping[str, Any]) -> Part:
    rows = data["rows"]
    return Part(str(data["path"]), bool(data["transposed"]), None if rows is None else (rows[0], rows[1]))


def _side(value: str) -> Side:
    if value == "previous":
        return "previous"
    if value == "next":
        return "next"
    raise ValueError(f"a side is 'previous' or 'next', not {value!r}")
