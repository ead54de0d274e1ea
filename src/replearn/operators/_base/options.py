"""Options of the operators: small frozen dataclasses; defining one registers it."""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from ...errors import ReplearnError

if TYPE_CHECKING:
    from ...blocks.anatomy import Anatomy, Kind

Side = Literal["previous", "next"]
SIDES: tuple[Side, ...] = ("previous", "next")
Sources = Literal["both", "previous", "next", "none"]
Coefficients = Literal["separate", "shared"]
Correction = Literal["none", "low-rank", "full"]
Start = Literal["mean", "previous", "next", "zero"]

registry: dict[str, type[Options]] = {}


@dataclass(frozen=True, slots=True)
class Need:
    """One weight that an operator reads: from which part of which neighbour, and in whose shape.

    `mix=True` reads it from both sides, for a mixture; `mix=False` reads it from `prefer`, or from the other side
    where that one does not fit.
    """

    role: str
    like: str = ""  # the part of the block whose shape it must have; by default the role itself
    previous: str = ""  # the part of the previous neighbour that is read; by default `like`
    next: str = ""
    mix: bool = True
    prefer: Side = "previous"
    by_path: bool = False  # the parts are parameters named by their path, not roles

    def part(self, side: str = "like") -> str:
        """The part whose shape the weight has, or the part that is read from the neighbour on this side."""
        return getattr(self, side) or self.like or self.role


@dataclass(frozen=True, kw_only=True)
class Options(ABC):
    """What every operator's options share: a name, the kinds of block it suits, and a module."""

    name: ClassVar[str]
    kinds: ClassVar[tuple[Kind, ...]]
    default_for: ClassVar[Kind | None] = None
    module: ClassVar[type[Any]]  # set by `class MyOperator(Operator, options=MyOptions)`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            registry[cls.name] = cls

    @abstractmethod
    def needs(self, anatomy: Anatomy) -> tuple[Need, ...]:
        """The weights to read for a block of this anatomy; ReplearnError if the operator does not fit it."""

    @property
    def sides(self) -> tuple[Side, ...]:
        """The neighbours that are read."""
        return ()

    def label(self) -> str:
        """The operator's name with the options that differ from the defaults."""
        fields = dataclasses.fields(self)
        changed = {f.name: value for f in fields if (value := getattr(self, f.name)) != f.default}
        shown = (value if isinstance(value, str) else f"{name}={value}" for name, value in changed.items())
        return f"{self.name} ({', '.join(shown)})" if changed else self.name

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(Options):
    """Options of operators that read neighbours.

    - `sources`: which neighbours are read. With one side, every weight comes from that side;
      with `none` the weight is the correction alone.
    - `stop_gradient`: True if no gradient flows to the sources (the paper).
    - `correction`: a learned D added to every weight: `none` (the paper), `low-rank`, `full`.
    """

    sources: Sources = "both"
    stop_gradient: bool = True
    correction: Correction = "none"
    rank: int = 8

    def __post_init__(self) -> None:
        self._one_of("sources", Sources)
        self._one_of("correction", Correction)
        if not isinstance(self.stop_gradient, bool):
            raise ReplearnError(f"stop_gradient is True or False, not {self.stop_gradient!r}.")
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise ReplearnError(f"rank is a whole number of at least 1, not {self.rank!r}.")
        if self.sources == "none" and self.correction == "none":
            raise ReplearnError(
                f"{type(self).__name__}(sources='none') has no weight left to compute with. "
                "Add correction='full' or 'low-rank', or use NoWeights(), the paper's control."
            )

    def _one_of(self, field: str, allowed: Any) -> None:
        value = getattr(self, field)
        if value not in get_args(allowed):
            choices = ", ".join(repr(choice) for choice in get_args(allowed))
            raise ReplearnError(f"{type(self).__name__}({field}={value!r}): {field} is one of {choices}.")

    @property
    def sides(self) -> tuple[Side, ...]:
        if self.sources == "both":
            return SIDES
        return () if self.sources == "none" else (self.sources,)


@dataclass(frozen=True, kw_only=True)
class MixingOptions(ReadingOptions):
    """Options of operators with learned coefficients a (previous) and b (next).

    - `coefficients`: `separate` a and b, or one `shared` by both sides.
    - `start`: the synthesized weight starts as the `mean` of its sources, as the `previous` or
      the `next` one, at `zero`, or with every coefficient at a number you give.
    """

    coefficients: Coefficients = "separate"
    start: Start | float = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("coefficients", Coefficients)
        if isinstance(self.start, str):
            self._one_of("start", Start)
        elif type(self.start) not in (int, float) or not -3e38 < self.start < 3e38:  # as a float32 holds it
            raise ReplearnError(
                f"start is 'mean', 'previous', 'next', 'zero' or a finite number, not {self.start!r}."
            )
        if self.start in ("previous", "next"):
            if self.start not in self.sides:
                raise ReplearnError(f"start={self.start!r} needs that side, but sources={self.sources!r}.")
            if self.coefficients == "shared":
                raise ReplearnError(
                    f"start={self.start!r} needs separate coefficients: a shared one weighs both sides alike."
                )


def options_from_dict(data: Mapping[str, Any]) -> Options:
    """The inverse of `to_dict`."""
    from .. import available  # imports all operators: a plan may be read before one was used

    fields = dict(data)
    if fields.get("recompute") is False:  # a removed option in older files, where it was off
        del fields["recompute"]
    name = fields.pop("name", None)
    known = available()
    if not isinstance(name, str) or name not in known:
        raise ReplearnError(f"There is no operator {name!r}; there are {', '.join(sorted(known))}.")
    own = [field.name for field in dataclasses.fields(known[name]) if field.init]
    if unknown := [field for field in fields if field not in own]:
        has = f"it has {', '.join(own)}" if own else "it has none"
        raise ReplearnError(
            f"The operator {name!r} does not have these options: {', '.join(map(repr, unknown))}; {has}."
        )
    return known[name](**fields)


def options_named(text: str) -> Options:
    """An operator written as NAME or NAME:option=value,option=value; ReplearnError lists the names there are.

    >>> options_named("basic:correction=low-rank,rank=4").label()
    'basic (low-rank, rank=4)'
    """
    name, _, rest = text.partition(":")
    options = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ReplearnError(
                f"operator={text!r}: write options as NAME:option=value, as projection:start=zero."
            )
        try:
            options[key.strip()] = json.loads(value)
        except ValueError:
            options[key.strip()] = value
    try:
        return options_from_dict({"name": name, **options})
    except ReplearnError as error:
        raise ReplearnError(f"operator={text!r}: {error}") from error
