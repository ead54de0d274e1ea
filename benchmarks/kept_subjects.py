"""The trained models that kept_after_replacement.py takes blocks out of: a run's, a recipe's, a small text's."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import torch

from replearn.experiments import recipes
from replearn.experiments.training.data.text import TextSet, text_set
from replearn.experiments.training.fit import fit
from replearn.experiments.training.full_model import FullModel, read_full_model
from replearn.experiments.training.processes import Processes
from replearn.experiments.training.recipe import Recipe
from replearn.experiments.training.run import Run, RunSpec
from replearn.experiments.training.tasks.language_modelling import LanguageModelling
from replearn.experiments.training.text_batches import DeviceText, TextBatches

TOPICS = "python_topics"


def trained(options: argparse.Namespace, device: torch.device) -> FullModel:
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
    if options.data == TOPICS:
        return trained_on_topics(recipe, options.seed, device)
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


def trained_on_topics(recipe: Recipe, seed: int, device: torch.device) -> FullModel:
    """A language model of Python's own help texts, which need no download."""
    variant = recipe.variant("E2E")
    spec = RunSpec(recipe=recipe, variant=variant, data=TOPICS, seed=seed, out=Path(mkdtemp()))
    task = LanguageModelling(spec, device, Processes())
    text = DeviceText(python_topics(recipe.text.min_count), device)
    task.batches = TextBatches(text, Processes(), recipe.batch_size, recipe.text.sequence_length)
    run = Run(spec, task, device, Processes())
    while not run.finished:
        run.start_epoch()
        for _ in range(run.steps_per_epoch):
            run.step()
        measured = run.end_epoch(0.0)
        print(f"epoch {measured.epoch}: perplexity {measured.measures[task.metric.key]:.1f}", flush=True)
    return FullModel(run.bare.eval(), task, f"{recipe.model}, {TOPICS}, seed {seed}, epoch {recipe.epochs}")


def python_topics(min_count: int) -> TextSet:
    """The texts behind Python's help(), every tenth paragraph for the test; they change with its version."""
    from pydoc_data.topics import topics

    lines = [line.strip() for name in sorted(topics) for line in topics[name].splitlines() if line.strip()]
    paragraphs = [" ".join(lines[begin : begin + 20]) for begin in range(0, len(lines), 20)]
    test = paragraphs[9::10]
    train = [text for number, text in enumerate(paragraphs) if number % 10 != 9]
    return text_set(TOPICS, train, test, test, min_count)
