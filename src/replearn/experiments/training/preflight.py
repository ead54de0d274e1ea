"""Tell before anything is trained which row of a comparison can't be."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...errors import ReplearnError
from ...planning.planner import plan
from .run import RunSpec
from .trained import fresh_model

REPLACING = "repl"


def refuse_impossible_rows(specs: Sequence[RunSpec]) -> None:
    """Plan each row that replaces blocks, on a fresh model, which that leaves as it is.

    Raises ReplearnError with the row's label where its operator does not fit, which would else come out when the
    rows before it are trained. Rows that start from weights of their own may bring a plan along, and are left.
    """
    fresh: dict[tuple[str, str], nn.Module] = {}
    for label, spec in {spec.variant.label: spec for spec in specs}.items():
        own = spec.recipe.pretrained is not None and spec.pretrained != spec.recipe.pretrained
        if own or REPLACING not in spec.variant.method.split("+"):
            continue
        key = spec.recipe.model, spec.data
        if key not in fresh:
            fresh[key], _ = fresh_model(spec.recipe, spec.data)
        try:
            plan(fresh[key], spec.variant.interval, spec.variant.begin, operator=spec.variant.operator)
        except ReplearnError as error:
            raise ReplearnError(f"The row {label} can't be trained. {error}") from error
