"""From the command line's words to runs: the recipe with its `--set`, the rows, the seeds, and their folders."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ReplearnError
from ..experiments import recipes
from ..experiments.report.collecting import read_folder
from ..experiments.training.comparable import differences
from ..experiments.training.packed import read_results
from ..experiments.training.recipe import Recipe, Variant, recipe_from_dict, slug
from ..experiments.training.results import Result, read_result
from ..experiments.training.run import RunSpec
from ..planning.serialization import encode
from .flags import whole_numbers

FIXED = ("name", "table", "data", "variants", "paper")
SIZES = ("sequence_length", "resize", "crop", "min_size", "max_size")
AT_LEAST_ONE = ("epochs", "batch_size", "accumulate", *SIZES)
SHARES = ("momentum", "label_smoothing")


def resolved(name: str, epochs: int | None, settings: Sequence[str], pretrained: str | None = None) -> Recipe:
    """The recipe with what the command line changes."""
    recipe = with_settings(recipes.recipe(name), settings)
    if pretrained is not None:
        recipe = replace(recipe, pretrained=pretrained)
    return recipe if epochs is None else replace(recipe, epochs=epochs)


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
            holder = holder.setdefault(group, {}) if isinstance(holder, dict) else None
        known = path.partition(".")[0] not in FIXED and (groups[:1] != ["augment"] or groups[-1] in recipe.data)
        if not isinstance(holder, dict) or not known:
            raise ReplearnError(f"--set {text}: a recipe has no field {path!r} to set.")
        holder[field] = value_of(value)
    try:
        changed = recipe_from_dict(fields)  # which knows all other fields, and their types
        check_ranges(changed.to_dict())
    except ReplearnError as error:
        raise ReplearnError(f"--set {' --set '.join(settings)}: {error}") from error
    return changed


def value_of(text: str) -> Any:
    """JSON where it is JSON (0.1, true, null, [0.9, 0.95]), else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def check_ranges(fields: Mapping[str, Any], where: str = "") -> None:
    """ReplearnError for a number out of its range, however deep it lies."""
    for name, value in fields.items():
        field = f"{where}{name}"
        if isinstance(value, Mapping):
            check_ranges(value, f"{field}.")
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                continue
            if name in AT_LEAST_ONE and number < 1:
                raise ReplearnError(f"{field}={value!r}: must be at least 1.")
            if not 0 <= number < math.inf:
                raise ReplearnError(f"{field}={value!r}: must be a finite number, and not below 0.")
            if name in SHARES and number > 1:
                raise ReplearnError(f"{field}={value!r}: must lie between 0 and 1.")
            if name == "betas" and number >= 1:
                raise ReplearnError(f"{field}={value!r}: must lie between 0 and 1, below 1.")


def data_of(recipe: Recipe, data: str | None) -> str:
    """The data set: the recipe's first unless another of its own is named."""
    if data is None:
        return recipe.data[0]
    if data not in recipe.data:
        raise ReplearnError(f"--data {data}: the recipe {recipe.name} is for {', '.join(recipe.data)}.")
    return data


def leads() -> bool:
    """Whether this process talks and writes: alone, or the first of those that torchrun started."""
    return os.environ.get("RANK", "0") == "0"


def variant_named(recipe: Recipe, label: str) -> Variant:
    """The variant of this label, in any spelling that comes to the same slug."""
    for variant in recipe.variants:
        if slug(variant.label) == slug(label):
            return variant
    known = ", ".join(slug(variant.label) for variant in recipe.variants)
    raise ReplearnError(f"--method {label}: the recipe {recipe.name} has {known}.")


def variants_named(recipe: Recipe, labels: list[str] | None) -> list[Variant]:
    if labels is None:
        return list(recipe.variants)
    return list(dict.fromkeys(variant_named(recipe, label) for label in labels))


def seeds_named(given: list[str] | None) -> list[int]:
    return whole_numbers("--seeds", given or ["0-2"])


def spec_of(
    recipe: Recipe, variant: Variant, data: str, seed: int, out: Path | None, root: Path | None
) -> RunSpec:
    """The run, with its folder OUT/DATA/METHOD/seed-N below `runs/RECIPE` or the folder that was given."""
    folder = (out or Path("runs") / recipe.name) / data / slug(variant.label) / f"seed-{seed}"
    return RunSpec(recipe=recipe, variant=variant, data=data, seed=seed, out=folder, data_root=root)


def found(spec: RunSpec, held: Result | None = None) -> Result | None:
    """The result in the run's folder, finished or not, or the one that is held; never one of other settings."""
    path = spec.out / "result.json"
    result = held or (read_result(path) if path.exists() else None)
    if result is None:
        return None
    changed = differences(result.recipe, spec.recipe.to_dict())
    changed += differences(result.variant, encode(spec.variant))
    for field, before, now in changed:
        where, flag = ("The file of runs", "file with --into") if held else (spec.out, "folder with --out")
        raise ReplearnError(
            f"{where} holds {spec.variant.label}, seed {spec.seed}, with other settings ({field} is {before!r} "
            f"there, {now!r} here). Choose another {flag}, or delete that one."
        )
    return result


def results_below(folder: Path) -> list[Result]:
    """The runs of one file, or of all result files and packed files below a folder, in order of their paths."""
    if folder.is_file():
        return read_results(folder)
    there = read_folder(folder)
    for entry in there.unread:  # left out, it could change what a comparison comes to
        raise ReplearnError(f"{folder / entry.path} can't be compared: {entry.reason}. Mend it, or move it away.")
    if not there.runs:
        raise ReplearnError(
            f"There are no result files below {folder}; train some with `replearn compare RECIPE`."
        )
    return [run.result for run in there.runs]
