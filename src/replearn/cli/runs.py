"""From the command line's words to runs: the recipe, the rows, the seeds, and the folders of their files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import ReplearnError
from ..experiments import recipes
from ..experiments.training.comparable import differences
from ..experiments.training.packed import read_results
from ..experiments.training.recipe import Recipe, Variant, slug
from ..experiments.training.results import Result, read_result
from ..experiments.training.run import RunSpec
from ..planning.serialization import encode
from .flags import whole_numbers
from .overrides import with_settings


def resolved(name: str, epochs: int | None, settings: Sequence[str], pretrained: str | None = None) -> Recipe:
    """The recipe with what the command line changes."""
    recipe = with_settings(recipes.recipe(name), settings)
    if pretrained is not None:
        recipe = replace(recipe, pretrained=pretrained)
    return recipe if epochs is None else replace(recipe, epochs=epochs)


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
    if not folder.exists():
        raise ReplearnError(f"There is no folder {folder}; write the one that the runs were trained into.")
    paths = [folder] if folder.is_file() else sorted(folder.rglob("*.json*"))
    files = [path for path in paths if folder.is_file() or is_result(path)]
    results = [result for path in files for result in read_results(path)]
    if not results:
        raise ReplearnError(
            f"There are no result files below {folder}; train some with `replearn compare RECIPE`."
        )
    return results


def is_result(path: Path) -> bool:
    """Whether a file says of itself that it is a result; recipes and comparisons lie beside them."""
    if not path.is_file():  # a pipe may never end
        return False
    with open(path, "rb") as file:
        begin = file.read(200)
    return b'"replearn-result' in begin or b'"replearn-runs' in begin
