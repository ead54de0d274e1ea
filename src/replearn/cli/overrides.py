"""`--set field=value`: a recipe with some of its fields changed, and their types checked."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ReplearnError
from ..experiments.training.recipe import Recipe, recipe_from_dict

FIXED = ("name", "table", "data", "variants", "paper")
SIZES = ("sequence_length", "resize", "crop", "min_size", "max_size")
AT_LEAST_ONE = ("epochs", "batch_size", "accumulate", *SIZES)
SHARES = ("momentum", "label_smoothing")


def with_settings(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe with `field=value` or `group.field=value` applied, in order."""
    if not settings:
        return recipe
    fields: dict[str, Any] = recipe.to_dict()
    for text in settings:
        path, equals, value = text.partition("=")
        if not equals:
            raise ReplearnError(f"--set {text}: write field=value, as --set optimizer.lr=0.1.")
        *groups, field = path.strip().split(".")
        holder: Any = fields
        for group in groups:
            if holder is fields["augment"] and group in recipe.data:
                fields["augment"].setdefault(group, {})
            holder = holder.get(group) if isinstance(holder, dict) and group not in FIXED else None
        if groups[:1] == ["augment"] and len(groups) == 2 and isinstance(holder, dict):
            holder[field] = value_of(value)  # may be new: recipe_from_dict knows which fields there are
            continue
        if not isinstance(holder, dict) or field not in holder or (not groups and field in FIXED):
            raise ReplearnError(
                f"--set {text}: a recipe has no field {path!r} to set; it has {fields_of(recipe)}."
            )
        holder[field] = value_of(value)
    changed = recipe_from_dict(fields)
    check_ranges(changed)
    return changed


def value_of(text: str) -> Any:
    """JSON where it is JSON (0.1, true, null, [0.9, 0.95]), else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def fields_of(recipe: Recipe) -> str:
    names = []
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        if field.name == "augment":
            names.append(f"augment.{recipe.data[0]}.FIELD")
        elif dataclasses.is_dataclass(value):
            names += [f"{field.name}.{inner.name}" for inner in dataclasses.fields(value)]
        elif field.name not in FIXED:
            names.append(field.name)
    return ", ".join(names)


def check_ranges(data: Any, where: str = "") -> None:
    """ReplearnError for a number out of its range; dataclasses are checked all the way down."""
    for name in (field.name for field in dataclasses.fields(data)):
        value, field = getattr(data, name), f"{where}{name}"
        for number in numbers_in(value):
            if name in AT_LEAST_ONE and number < 1:
                raise ReplearnError(f"{field}={value!r}: must be at least 1.")
            if not 0 <= number < math.inf:
                raise ReplearnError(f"{field}={value!r}: must be a finite number, and not below 0.")
            if name in SHARES and number > 1:
                raise ReplearnError(f"{field}={value!r}: must lie between 0 and 1.")
            if name == "betas" and number >= 1:
                raise ReplearnError(f"{field}={value!r}: must lie between 0 and 1, below 1.")
        held = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, inner in held:
            if dataclasses.is_dataclass(inner) and name not in FIXED:
                check_ranges(inner, f"{field}.{key}." if key else f"{field}.")


def numbers_in(value: Any) -> list[float]:
    """A number, or those in a tuple."""
    held = value if isinstance(value, tuple) else (value,)
    return [each for each in held if isinstance(each, (int, float)) and not isinstance(each, bool)]
