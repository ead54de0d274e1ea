"""Networks that recipes train here, kept in a cache folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from subjects import PAD, Subject, every_second, of_images

from replearn.experiments import recipes
from replearn.experiments.training.fit import fit
from replearn.experiments.training.recipe import Augment, Recipe
from replearn.experiments.training.run import RunSpec
from replearn.experiments.training.trained import read_full_model


@dataclass(frozen=True)
class Training:
    """A recipe, what is changed in it, and the placements of blocks that are measured, by interval."""

    recipe: str
    data: str
    epochs: int
    model: str = ""
    augment: Augment | None = None
    intervals: tuple[int, ...] = (2,)


TRAINED = {
    "resnet32-cifar10": Training("t1_resnet32", "cifar10", 40),
    "resnet56-cifar100": Training("cifar100_resnet110", "cifar100", 40, model="resnet56"),
    "vit-cifar10": Training("cifar100_vit_patch4", "cifar10", 60, augment=Augment(pad=PAD, flip=True)),
    "vit-cifar100": Training("cifar100_vit_patch4", "cifar100", 60),
    "lm-wikitext2": Training("tab_wikitext2", "wikitext2", 15, intervals=(2, 4)),
}


def train_missing(
    name: str,
    seeds: Sequence[int],
    cache: Path,
    root: Path | None,
    device: torch.device,
    epochs: int | None = None,
) -> None:
    """Train the networks that the cache does not hold, all seeds together."""
    training = TRAINED[name] if epochs is None else replace(TRAINED[name], epochs=epochs)
    recipe = recipe_of(training, device)
    specs = [
        RunSpec(
            recipe=recipe,
            variant=recipe.variant("E2E"),
            data=training.data,
            seed=seed,
            out=cache / name / f"seed-{seed}",
            data_root=root,
        )
        for seed in seeds
        if not (cache / name / f"seed-{seed}" / "result.json").exists()
    ]
    if specs:
        fit(specs, device=str(device), resume=True)


def recipe_of(training: Training, device: torch.device) -> Recipe:
    recipe = recipes.recipe(training.recipe)
    changes: dict[str, Any] = {"epochs": training.epochs, "data": (training.data,)}
    if training.model:
        changes["model"] = training.model
    if training.augment is not None:
        changes["augment"] = {training.data: training.augment}
    if device.type == "cpu":
        changes["precision"] = "float32"
    elif "resnet" in changes.get("model", recipe.model):
        changes |= {"precision": "bfloat16", "channels_last": True}
    return replace(recipe, **changes)


def trained(
    name: str, seed: int, cache: Path, root: Path | None, device: torch.device, test: int | None
) -> list[Subject]:
    """One network of the cache, once for each placement."""
    training = TRAINED[name]
    full = read_full_model(cache / name / f"seed-{seed}", device, root)
    model = full.model.eval()
    if full.metric == "accuracy":
        base = replace(of_images(name, model, training.data, root, device, test), net_seed=seed)
    else:
        base = Subject(
            name=name,
            model=model,
            out=(),
            draw=lambda count, at: full.train_batches(count, count, at)[0][0],
            score=full.score,
            net_seed=seed,
            metric=full.metric,
        )
    found = []
    for interval in training.intervals:
        out = every_second(model, interval)
        label = name if interval == 2 else f"{name}-{len(out)}-out"
        found.append(replace(base, name=label, out=out))
    return found
