"""The trained models that kept_after_replacement.py takes blocks out of: a run's, or a recipe's."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from replearn.experiments import recipes
from replearn.experiments.training.fit import fit
from replearn.experiments.training.run import RunSpec
from replearn.experiments.training.trained import Trained, read_full_model


def trained(options: argparse.Namespace, device: torch.device) -> Trained:
    """The run that was named, or the recipe after training end to end."""
    if options.run is not None:
        return read_full_model(options.run, device, options.data_root)
    recipe = replace(recipes.recipe(options.recipe), epochs=options.epochs)
    if device.type == "cpu":
        recipe = replace(recipe, precision="float32")
    elif recipe.task == "classification":
        # the fast form: in bfloat16 without channels_last a CIFAR ResNet takes four times as long
        recipe = replace(recipe, precision="bfloat16", channels_last=True)
    if options.model:
        recipe = replace(recipe, model=options.model)
    if options.batch_size:
        recipe = replace(recipe, batch_size=options.batch_size)
    if options.rate:
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, lr=options.rate))
    if options.length:
        recipe = replace(recipe, text=replace(recipe.text, sequence_length=options.length))
    slug = f"{recipe.model.replace(':', '-')}-{options.data}-{recipe.epochs}-epochs-seed-{options.seed}"
    out = options.runs / slug
    spec = RunSpec(
        recipe=recipe,
        variant=recipe.variant("E2E"),
        data=options.data,
        seed=options.seed,
        out=out,
        data_root=options.data_root,
    )
    fit([spec], device=options.device, resume=(out / "checkpoint.safetensors").exists())
    return read_full_model(out, device, options.data_root)
