"""The plan: frozen data that says which blocks are removed and what replaces them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..blocks.anatomy import Anatomy, Part
from ..errors import ReplearnError
from ..operators._base.options import Options, Side
from .serialization import decode, encode, parse
from .table import plan_table

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
    parameters_after: int  # of the operator while it is trained
    notes: tuple[str, ...] = ()
    parameters_deployed: int | None = None  # of the operator as a plain module; None in plans of older files


@dataclass(frozen=True, slots=True)
class Skipped:
    """A block that the placement selects and that can't be replaced."""

    name: str
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The targets with their sources and operators, and the model's parameters before and after.

    `print(plan)` shows a table; `to_json` and `from_json` round-trip exactly. `parameters_before` and `_after`
    count trainable parameters, each shared tensor once; `deployed_before` and `_after` all parameters of the
    deployed model.
    """

    model: str
    placement: str
    num_blocks: int
    targets: tuple[Target, ...]
    skipped: tuple[Skipped, ...]
    parameters_before: int
    parameters_after: int
    notes: tuple[str, ...] = ()
    deployed_before: int | None = None
    deployed_after: int | None = None

    def __str__(self) -> str:
        return plan_table(self)

    def __post_init__(self) -> None:
        if not self.targets:
            raise ReplearnError("A plan needs at least one target; make it with replearn.plan(model).")
        names: set[str] = set()
        for target in self.targets:
            if target.name in names:
                raise ReplearnError(f"The plan names {target.name!r} twice; a block is replaced once.")
            names.add(target.name)
        for target in self.targets:
            for source in (target.previous, target.next):
                if source in names:
                    raise ReplearnError(
                        f"{source!r} is a target and a source of {target.name!r}: a target's neighbours must stay."
                    )

    def to_json(self) -> str:
        """The plan as one line of JSON."""
        return json.dumps({"replearn_plan": FORMAT, **encode(self)})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back; raises ReplearnError for anything that is not one."""
        try:
            data = parse(text, "it")
            if not isinstance(data, dict) or "replearn_plan" not in data:
                raise ReplearnError("JSON without the key 'replearn_plan'")
        except ReplearnError as error:
            raise ReplearnError(
                f"This is not a plan: {str(error).removesuffix('.')}. Pass the text that plan.to_json() gave."
            ) from error
        version = data.pop("replearn_plan")
        if type(version) is not int or version != FORMAT:
            found = ascii(version)[:40] if isinstance(version, (int, float, str)) else type(version).__name__
            raise ReplearnError(
                f"The plan has format {found}; this version of replearn reads {FORMAT}. "
                "Read it with the version that wrote it."
            )
        try:
            return decode(cls, data, "plan")
        except (RecursionError, ReplearnError) as error:
            deep = isinstance(error, RecursionError)
            reason = "it is nested too deeply" if deep else str(error).removesuffix(".")
            raise ReplearnError(
                f"This is a damaged plan: {reason if len(reason) < 400 else reason[:400] + '...'}. "
                "Make it again with replearn.plan."
            ) from None
