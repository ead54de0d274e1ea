"""Every recipe of the folder is whole, states its claim, and agrees with the others on what the paper prints."""

import json
import shlex
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
import torch

from replearn import ReplearnError, plan
from replearn.experiments import recipes
from replearn.experiments.training import data
from replearn.experiments.training.compare import compare
from replearn.experiments.training.comparison_table import spread
from replearn.experiments.training.methods import method_for
from replearn.experiments.training.methods.base import Setting
from replearn.experiments.training.packed import read_results
from replearn.experiments.training.recipe import recipe_from_dict

ROOT = Path(__file__).parent.parent
NAMES = recipes.available()
every_recipe = pytest.mark.parametrize("name", NAMES)


@every_recipe
def test_a_recipe_has_its_name_and_survives_json(name):
    recipe = recipes.recipe(name)
    assert recipe.name == name
    assert recipe_from_dict(recipe.to_dict()) == recipe


@every_recipe
def test_the_claim_is_whole_and_its_command_can_be_typed(name):
    pytest.importorskip("typer")
    from replearn.cli.app import loaded

    claim = recipes.claim(name)
    assert tuple(claim) == recipes.CLAIM
    program, command, *arguments = shlex.split(claim["Command"])
    assert program == "replearn"
    parsed = loaded(command).make_context(command, arguments).params
    assert parsed["recipe"] in (name, [name], (name,))
    assert parsed["data"] in (None, *recipes.recipe(name).data)


@every_recipe
def test_a_number_is_claimed_only_where_committed_results_say_it(name):
    claim = recipes.claim(name)
    if claim["Backed by"] == recipes.UNMEASURED:
        assert claim["Expected"] == recipes.UNMEASURED
        return
    if not (ROOT / "benchmarks").exists():
        pytest.skip("the results are in the repository, not in the source distribution")
    (comparison,) = compare(read_results(ROOT / claim["Backed by"]))
    assert comparison.recipe == name
    assert f"--seeds {','.join(map(str, comparison.rows[0].seeds))}" in claim["Command"]
    for row in comparison.rows:
        assert f"{row.label} {spread(row.score, row.std)}" in claim["Expected"]


@every_recipe
def test_rows_have_names_of_their_own_and_methods_that_exist(name):
    pytest.importorskip("typer")
    from replearn.cli.runs import slug

    recipe = recipes.recipe(name)
    slugs = [slug(variant.label) for variant in recipe.variants]
    assert len(set(slugs)) == len(slugs)
    assert not any("," in variant.label for variant in recipe.variants)
    assert [variant.method for variant in recipe.variants].count("e2e") == 1
    for variant in recipe.variants:
        assert method_for(Setting(variant, seed=0))


@every_recipe
def test_every_replacement_has_its_removal_beside_it(name):
    variants = recipes.recipe(name).variants
    floors = {(v.interval, v.first or v.interval) for v in variants if v.method == "removal"}
    for variant in variants:
        if variant.method == "repl":
            assert (variant.interval, variant.first or variant.interval) in floors


@every_recipe
def test_data_sets_exist_and_each_has_its_augmentation(name):
    recipe = recipes.recipe(name)
    assert set(recipe.data) <= set(recipe.augment) <= set(data.available())


@every_recipe
def test_printed_rows_stand_beside_rows_that_are_trained(name):
    recipe = recipes.recipe(name)
    labels = {variant.label for variant in recipe.variants}
    places = [(row.data, row.label) for row in recipe.paper]
    assert len(set(places)) == len(places)
    assert {label for _, label in places} <= labels
    assert {on for on, _ in places} <= set(recipe.data)
    assert bool(recipe.paper) == bool(recipe.table)


def test_the_paper_prints_the_same_end_to_end_runs_in_every_table():
    printed = defaultdict(set)
    for name in NAMES:
        recipe = recipes.recipe(name)
        for row in recipe.paper:
            if row.label == "E2E":
                printed[recipe.model, row.data].add(row.score)
    assert len(printed) == 25
    assert all(len(accuracies) == 1 for accuracies in printed.values())


def test_every_classification_table_of_the_paper_has_recipes():
    found = [recipes.recipe(name) for name in NAMES]
    tables = {recipe.table for recipe in found} | {row.table for recipe in found for row in recipe.paper}
    assert tables >= {"t1", "t2", "t3", "t4", "t5", "t6"}
    assert tables >= {"tab:repl_ablation", "tab:repl_sd_ckpt", "tab:adaptive_repl", "tab:repl_param_ablation"}


@cache
def model_of(name):
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    from replearn.experiments.training.architectures import architecture, is_language_model, language_model
    from replearn.experiments.training.scene_models import is_detector, is_segmenter, on_meta

    if is_detector(name) or is_segmenter(name):
        if "plus" in name:
            pytest.importorskip("segmentation_models_pytorch")
        return on_meta(name)
    with torch.device("meta"):
        if is_language_model(name):
            return language_model(name, num_words=100)
        return architecture(name, size=224 if name.endswith("_16") else 32)


def num_targets(name, label):
    recipe = recipes.recipe(name)
    variant = recipe.variant(label)
    found = plan(model_of(recipe.model), variant.interval, variant.begin, operator=variant.operator)
    return len(found.targets)


@pytest.mark.parametrize(
    ("name", "printed_equation", "densest"),
    [("t2_resnet34", 1, 4), ("t2_resnet101", 5, 9), ("t2_resnet152", 9, 13), ("t1_vit_tiny8", 2, 3)],
)
def test_both_placements_replace_as_many_blocks_as_the_recipe_says(name, printed_equation, densest):
    assert num_targets(name, "RepL") == printed_equation
    assert num_targets(name, "RepL first=2") == densest


@every_recipe
def test_every_replacement_can_be_planned_on_the_recipes_model(name):
    for variant in recipes.recipe(name).variants:
        if variant.method in ("repl", "removal", "adaptive"):
            assert num_targets(name, variant.label) >= 1


def test_an_unknown_recipe_is_answered_with_the_nearest_names():
    with pytest.raises(ReplearnError, match=r"There is no recipe 't1_resnet23'. Did you mean t1_resnet32"):
        recipes.recipe("t1_resnet23")


def test_a_file_of_ones_own_is_a_recipe_too(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from dataclasses import replace\nfrom replearn.experiments import recipes\n"
        "RECIPE = replace(recipes.recipe('demo'), name='mine', epochs=3)\n"
    )
    assert recipes.recipe(str(mine)).epochs == 3
    (tmp_path / "recipe.json").write_text(json.dumps(recipes.recipe("demo").to_dict()))
    assert recipes.recipe(str(tmp_path / "recipe.json")) == recipes.recipe("demo")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.py", "RECIPE = 3", "has no RECIPE = Recipe"),
        ("b.py", "1 / 0", "can't be read as a recipe: ZeroDivisionError"),
        ("c.json", "{", "Can't read the recipe"),
        ("d.json", '{"name": "d", "wings": 2}', "no field 'wings'"),
        ("e.py", None, "There is no file"),
        ("f.json", None, "Can't read the recipe"),
    ],
)
def test_a_broken_file_is_told_and_named(tmp_path, name, text, message):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(ReplearnError, match=message):
        recipes.recipe(str(path))
