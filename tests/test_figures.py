"""The paper's figures from checkpoints: features with their numbers, feature maps, and what can't be drawn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from replearn.errors import ReplearnError
from replearn.experiments import recipes
from replearn.experiments.report.paper_figures import (
    bounded,
    default_layers,
    features_figure,
    features_of,
    maps_of,
    outputs_at,
    paper_figures,
    penultimate,
)
from replearn.experiments.training.fit import fit
from replearn.experiments.training.recipe import Variant
from replearn.experiments.training.run import RunSpec
from replearn.experiments.training.trained import read_full_model, read_trained

VARIANTS = (
    Variant(label="E2E", method="e2e"),
    Variant(label="RepL", method="repl", interval=2),
    Variant(label="Stochastic Depth", method="stochastic_depth"),
)


def train(folder: Path, model: str, variants=VARIANTS) -> dict[str, Path]:
    """One epoch of each variant on digits: enough for features that differ."""
    recipe = replace(recipes.recipe("demo"), model=model, epochs=1, batch_size=479, variants=variants)
    specs = [
        RunSpec(recipe=recipe, variant=variant, data="digits", seed=0, out=folder / variant.label)
        for variant in variants
    ]
    fit(specs, device="cpu")
    return {spec.variant.label: spec.out for spec in specs}


@pytest.fixture(scope="module")
def resnets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return train(tmp_path_factory.mktemp("resnets"), "cifar_resnet:20:4")


@pytest.fixture(scope="module")
def vits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("timm")
    return train(tmp_path_factory.mktemp("vits"), "vit:16:4:2:2", VARIANTS[:2])


@pytest.mark.parametrize("kind", ["resnets", "vits"])
def test_one_command_draws_both_figures_with_numbers(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    runs = request.getfixturevalue(kind)
    written, scores = paper_figures([runs["E2E"], runs["RepL"]], tmp_path / "figures", images=30)
    assert [path.name for path in written] == ["features.svg", "feature_maps.png", "figures.json"]
    assert all(path.stat().st_size > 100 for path in written)
    assert [score.label for score in scores] == ["E2E", "RepL"]
    for score in scores:
        assert -1 <= score.silhouette <= 1
        assert len(score.points) == 30
    numbers = json.loads((tmp_path / "figures" / "figures.json").read_text())
    assert numbers["features"][1]["silhouette"] == scores[1].silhouette
    titles = [axes.get_title() for axes in features_figure(scores).axes]
    assert f"silhouette {scores[0].silhouette:.3f}" in titles[0]


def test_a_loaded_run_reaches_what_its_result_file_says(resnets: dict[str, Path]) -> None:
    for label in ("E2E", "RepL", "Stochastic Depth"):
        run = read_trained(resnets[label])
        images, labels = run.test(360)
        with torch.no_grad():
            reached = 100 * (run.model(images).argmax(1) == labels).float().mean().item()
        assert reached == pytest.approx(run.result.last.measures["test_accuracy"], abs=1e-3)


def test_the_same_images_are_shown_of_every_run_with_classes_evenly(resnets: dict[str, Path]) -> None:
    one, other = (read_trained(resnets[label]) for label in ("E2E", "RepL"))
    assert torch.equal(one.test(50)[0], other.test(50)[0])
    assert one.test(50)[1].bincount().tolist() == [5] * 10
    assert one.test(30)[0].shape == (30, 1, 8, 8)


def test_penultimate_features_are_what_the_classifier_is_given() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    x = torch.randn(5, 4)
    torch.testing.assert_close(penultimate(model, x, batch=2), torch.relu(model[1](x)))
    assert not model[3]._forward_hooks  # no trace


def test_a_bounded_part_of_a_set_is_read_and_many_classes_have_ten_colours(resnets: dict[str, Path]) -> None:
    assert bounded(SimpleNamespace(example=torch.empty(2, 3, 224, 224)), 5000) == 2**30 // (4 * 3 * 224 * 224)
    assert bounded(SimpleNamespace(example=torch.empty(2, 1, 8, 8)), 5000) == 5000
    score = features_of(read_trained(resnets["E2E"]), 30)
    assert classes_in(features_figure([score])) == [f"class {label}" for label in range(10)]
    many = score._replace(classes=range(30))
    assert classes_in(features_figure([many]))[-1] == "20 other classes"


def test_of_many_classes_so_many_are_shown_that_each_has_several_images(resnets: dict[str, Path]) -> None:
    """A thousand images of ImageNet would be one a class, which has no silhouette."""
    run = read_trained(resnets["E2E"])
    assert sorted(set(features_of(run, 10).classes)) == [0, 2, 4, 6, 8]
    labels = run.test(30, 3)[1]
    assert labels.bincount().tolist() == [10, 0, 0, 10, 0, 0, 10]


def classes_in(figure) -> list[str]:
    return [entry.get_text() for entry in figure.legends[0].get_texts()]


def test_models_without_features_are_told() -> None:
    with pytest.raises(ReplearnError, match="no linear layer"):
        penultimate(nn.Conv2d(1, 1, 1), torch.zeros(1, 1, 2, 2))
    broken = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.constant_(broken[0].weight, float("nan"))
    with pytest.raises(ReplearnError, match="not finite: this run has diverged"):
        penultimate(broken, torch.zeros(1, 2))


def test_maps_are_of_convolutions_and_of_patches() -> None:
    assert maps_of(torch.randn(2, 7, 4, 4)).shape == (2, 4, 4)
    tokens = torch.randn(2, 1 + 9, 5)
    torch.testing.assert_close(maps_of(tokens)[0, 0, 0], tokens[0, 1].abs().mean())
    with pytest.raises(ReplearnError, match=r"shape \(2, 7\) is no picture"):
        maps_of(torch.randn(2, 7))


def test_layers_are_found_by_name_or_told(resnets: dict[str, Path]) -> None:
    run = read_trained(resnets["RepL"])
    assert default_layers(run) == ("layer1.2", "layer2.2", "layer3.2")
    images, _ = run.test(2)
    assert outputs_at(run.model, ["layer2.1"], images)["layer2.1"].shape == (2, 8, 4, 4)
    with pytest.raises(ReplearnError, match=r"no layer 'layer9'; its parts are conv1, bn1"):
        outputs_at(run.model, ["layer9"], images)


def test_a_vits_layers_are_a_quarter_apart(vits: dict[str, Path]) -> None:
    assert default_layers(read_trained(vits["E2E"])) == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


def test_runs_that_dont_belong_together_are_told(
    resnets: dict[str, Path], vits: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ReplearnError, match=r"its model is vit:16:4:2:2, not cifar_resnet:20:4"):
        paper_figures([resnets["E2E"], vits["E2E"]], tmp_path)
    with pytest.raises(ReplearnError, match="Name the folders of finished runs"):
        paper_figures([], tmp_path)


def test_an_unfinished_or_damaged_run_is_told(resnets: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with pytest.raises(ReplearnError, match=r"There is no run at .*run: it has no result\.json"):
        read_trained(folder)
    (folder / "result.json").write_text((resnets["E2E"] / "result.json").read_text())
    with pytest.raises(ReplearnError, match=r"has no model\.safetensors: the run has not finished"):
        read_trained(folder)
    (folder / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ReplearnError, match="can't be read"):
        read_trained(folder)


def test_the_command_draws_them(resnets: dict[str, Path], tmp_path: Path) -> None:
    from command_line import shown

    words = ("figures", str(resnets["E2E"]), "-o", str(tmp_path), "--samples", "30", "--layers", "layer1.0")
    assert "silhouette" in shown(*words)
    assert (tmp_path / "feature_maps.png").exists()


def test_the_full_model_is_asked_for_where_an_analysis_needs_it(resnets: dict[str, Path]) -> None:
    assert read_full_model(resnets["E2E"], torch.device("cpu")).name == "demo, digits, seed 0, epoch 1"
    with pytest.raises(ReplearnError, match=r"trained with RepL \(repl\), so it is not the full model"):
        read_full_model(resnets["RepL"], torch.device("cpu"))


def test_a_run_is_read_without_its_data_and_a_stream_is_told(resnets: dict[str, Path]) -> None:
    run = read_trained(resnets["RepL"])
    assert run.model(run.example).shape == (2, 10)
    elsewhere = replace(run, result=replace(run.result, data="imagenet"), data_root=Path("/nowhere"))
    with pytest.raises(ReplearnError, match=r"imagenet"):
        elsewhere.test(4)
