"""Files of earlier releases load for ever: a checkpoint, plans, a result, a half-trained run and its recipe."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import replearn
from replearn.experiments.training.recipe import recipe_from_dict, variant_from_dict
from replearn.experiments.training.results import read_result
from replearn.surgery.replace import plan_of

RELEASES = sorted((Path(__file__).parent / "fixtures").glob("release_*"))  # written by each release's own code


@pytest.fixture(params=RELEASES, ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    folder: Path = request.param
    return folder


def encoder() -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(5)))


def within(old: Any, new: Any) -> bool:
    """Is all of the old data in the new, which may have fields more?"""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and within(old[key], new[key]) for key in old)
    if isinstance(old, list):
        return isinstance(new, list) and len(old) == len(new) and all(map(within, old, new))
    return bool(old == new)


def test_there_is_a_release_to_load() -> None:
    assert "release_0_1_0" in [path.name for path in RELEASES]


def test_its_checkpoint_gives_the_output_that_it_gave_then(release: Path) -> None:
    expected = json.loads((release / "expected.json").read_text())
    model = replearn.load(replearn.models.CifarResNet(20, width=4), release / "checkpoint.safetensors").eval()
    found = model(torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8))
    torch.testing.assert_close(found, torch.tensor(expected["output"]), rtol=1e-4, atol=1e-5)
    assert [target.name for target in plan_of(model).targets] == expected["targets"]


@pytest.mark.parametrize(
    ("name", "build"),
    [("plan.json", lambda: replearn.models.CifarResNet(20, width=4)), ("plan_transformer.json", encoder)],
)
def test_its_plans_fit_the_models_they_were_made_for(release: Path, name: str, build: Any) -> None:
    text = (release / name).read_text()
    plan = replearn.Plan.from_json(text)
    assert replearn.Plan.from_json(plan.to_json()) == plan
    assert within(json.loads(text), json.loads(plan.to_json())), "what it said is still said"
    model = replearn.replace_(build(), plan)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == plan.parameters_after


def test_its_result_is_read_with_all_its_numbers(release: Path) -> None:
    written = json.loads((release / "run" / "result.json").read_text())
    result = read_result(release / "run" / "result.json")
    assert result.finished
    assert within(written, json.loads(result.to_json()))
    assert recipe_from_dict(result.recipe).to_dict() == recipe_from_dict(written["recipe"]).to_dict()
    assert replearn.Plan.from_json(json.dumps(result.plan)).num_blocks == 9


def test_its_half_trained_run_goes_on_to_the_result_it_came_to_then(release: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from replearn.experiments.training.fit import fit
    from replearn.experiments.training.run import RunSpec

    then = read_result(release / "run" / "result.json")
    shutil.copy(release / "run" / "checkpoint.safetensors", tmp_path)
    recipe, variant = recipe_from_dict(then.recipe), variant_from_dict(then.variant)
    spec = RunSpec(recipe=recipe, variant=variant, data="digits", seed=then.seed, out=tmp_path)
    (now,) = fit([spec], device="cpu", resume=True)
    assert now.epochs[0] == then.epochs[0]  # kept from the file
    for value in ("train_loss", "test_loss", "test_accuracy"):
        assert getattr(now.last, value) == pytest.approx(getattr(then.last, value), rel=1e-3), value


def test_a_state_that_lacks_a_field_of_today_s_recipes_has_its_default(release: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from replearn.experiments.training.fit import fit
    from replearn.experiments.training.keeping import identity, identity_as_now
    from replearn.experiments.training.run import RunSpec
    from replearn.experiments.training.state import read_state, write_state

    then = read_result(release / "run" / "result.json")
    tensors, about = read_state(release / "run" / "checkpoint.safetensors")
    del about["identity"]["recipe"]["clip_norm"], about["identity"]["variant"]["drop_rate"]
    recipe, variant = recipe_from_dict(then.recipe), variant_from_dict(then.variant)
    spec = RunSpec(recipe=recipe, variant=variant, data="digits", seed=then.seed, out=tmp_path)
    assert identity_as_now(about["identity"]) == identity(spec)
    about["identity"]["recipe"]["clip_norm"] = 1.0
    write_state(tmp_path / "checkpoint.safetensors", tensors, about)
    with pytest.raises(replearn.ReplearnError, match=r"belongs to another run \(its recipe differ\)"):
        fit([spec], device="cpu", resume=True)


def test_its_trained_model_is_read(release: Path) -> None:
    from replearn.experiments.training.architectures import architecture

    path = release / "run" / "model.safetensors"
    model = replearn.load(architecture("cifar_resnet:20:2", num_classes=10, channels=1, size=8), path)
    assert plan_of(model).num_blocks == 9
