"""`replearn analyze`: from a run's folder to tables, JSON and a picture, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")

from command_line import shown as call
from official_layouts import write_imagenet
from texts import text_root  # noqa: F401

from replearn.experiments.training import data
from replearn.experiments.training.trained import read_full_model, read_trained

TINY = """
from replearn.experiments.training.recipe import Optimizer, Recipe, Variant

RECIPE = Recipe(
    name="tiny",
    table="",
    model="cifar_resnet:20:4",
    data=("digits",),
    variants=(Variant(label="E2E", method="e2e"), Variant(label="RepL", method="repl", first=2)),
    epochs=1,
    batch_size=479,
    optimizer=Optimizer(lr=0.05),
)
"""
QUICK = ["--first", "2", "--samples", "40", "--batch-size", "20", "--iterations", "5"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trained runs, one of them end to end."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.py").write_text(TINY)
    for method in ("e2e", "repl"):
        call("train", str(folder / "tiny.py"), "--method", method, "--device", "cpu", "--out", str(folder))
    return folder / "digits"


def test_a_run_is_analysed_into_tables_json_and_a_picture(runs: Path) -> None:
    run = runs / "e2e" / "seed-0"
    more = ["--operator", "basic:correction=full", "--convergence", "2"]
    shown = call("analyze", str(run), *QUICK, *more)
    assert "tiny, digits, seed 0, epoch 1" in shown
    assert "Local errors and output deviation" in shown
    assert "Convergence of plain SGD from the start (eta 0.005, 2 steps)" in shown
    found = json.loads((run / "analysis" / "analysis.json").read_text())
    assert [target["name"] for target in found["targets"]] == ["layer1.1", "layer2.1", "layer3.1"]
    assert found["num_samples"] == 20
    assert found["convergence"] is not None
    assert (run / "analysis" / "analysis.svg").stat().st_size > 10_000


def test_json_on_the_screen_and_files_elsewhere(runs: Path, tmp_path: Path) -> None:
    checkpoint = runs / "e2e" / "seed-0" / "checkpoint.safetensors"
    more = ["--json", "--no-gradients", "--out", str(tmp_path)]
    shown = call("analyze", str(checkpoint), *QUICK, "--operator", "no_weights", *more)
    found = json.loads(shown)
    assert found["gradient"] is None
    assert (tmp_path / "analysis.svg").read_text().lstrip().startswith("<?xml")


LANGUAGE = """
from replearn.experiments.training.recipe import Optimizer, Recipe, Text, Variant

RECIPE = Recipe(
    name="words", table="", task="language_modelling", model="lm:16:4:2:32", data=("wikitext2",),
    variants=(Variant(label="E2E", method="e2e"),), epochs=1, batch_size=8, text=Text(sequence_length=8),
    optimizer=Optimizer(name="adamw", lr=0.003),
)
"""


def test_a_language_models_run_is_analysed_on_windows_of_its_text(
    text_root: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    (tmp_path / "words.py").write_text(LANGUAGE)
    where = ["--device", "cpu", "--data-root", str(text_root)]
    call("train", str(tmp_path / "words.py"), "--method", "e2e", "--out", str(tmp_path), *where)
    run = tmp_path / "wikitext2" / "e2e" / "seed-0"
    words = [*QUICK, "--no-gradients", "--picture", "none", "--operator", "projection"]
    shown = call("analyze", str(run), *words, *where)
    assert "words, wikitext2, seed 0, epoch 1" in shown
    found = json.loads((run / "analysis" / "analysis.json").read_text())
    assert [target["name"] for target in found["targets"]] == ["blocks.1"]
    trained = read_full_model(run, torch.device("cpu"), text_root)
    result = json.loads((run / "result.json").read_text())
    assert trained.metric == "perplexity"
    kept = result["epochs"][-1]["test_perplexity"]
    assert trained.score(trained.model) == pytest.approx(kept, rel=1e-4)


@pytest.fixture
def streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs on a small ImageNet in the official layout, whose counts nobody asks for."""
    pytest.importorskip("torchvision")
    write_imagenet(tmp_path / "data" / "imagenet", train=12, val=6)
    plain = data.load

    def loose(name: str, root: Path | None) -> object:
        return replace(plain(name, root, strict_counts=False), workers=0, num_classes=1000)  # type: ignore[type-var]

    monkeypatch.setattr(data, "load", loose)
    monkeypatch.setenv("REPLEARN_DATA", str(tmp_path / "data"))
    sized = 'augment={"imagenet": Augment(resize=16)},\n)'
    recipe = TINY.replace('("digits",)', '("imagenet",)').replace("479", "8").rstrip().removesuffix(")") + sized
    (tmp_path / "tiny.py").write_text(recipe.replace("import Optimizer", "import Augment, Optimizer"))
    for method in ("e2e", "repl"):
        call("train", str(tmp_path / "tiny.py"), "--method", method, "--device", "cpu", "--out", str(tmp_path))
    return tmp_path / "imagenet"


def test_a_streamed_set_is_analysed_on_a_part_and_evaluated_in_int8(streamed: Path) -> None:
    run = streamed / "e2e" / "seed-0"
    few = ["--first", "2", "--samples", "16", "--batch-size", "8", "--iterations", "3"]
    assert "tiny, imagenet, seed 0" in call("analyze", str(run), *few, "--no-gradients")
    assert json.loads((run / "analysis" / "analysis.json").read_text())["num_samples"] == 8
    assert read_trained(run).test(4)[0].shape == (4, 3, 16, 16)  # what t-SNE and feature maps look at
    pytest.importorskip("torchao")
    found = json.loads(call("evaluate", str(streamed / "repl" / "seed-0"), "--int8", "--samples", "9", "--json"))
    assert found["calibration_images"] == 9
    result = json.loads((streamed / "repl" / "seed-0" / "result.json").read_text())
    assert found["measures"]["float32"]["test_loss"] == pytest.approx(result["epochs"][-1]["test_loss"], rel=1e-3)
    assert found["measures"]["int8"].keys() == {"test_loss", "test_accuracy", "test_top5"}
    assert "float32  loss" in call("evaluate", str(run))


def test_figures_are_drawn_of_a_streamed_set(streamed: Path, tmp_path: Path) -> None:
    """t-SNE and feature maps of ImageNet look at a part of it."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    runs = [str(streamed / method / "seed-0") for method in ("e2e", "repl")]
    told = call("figures", *runs, "--samples", "12", "--out", str(tmp_path / "figures"))
    assert told.count("silhouette") == 2
    numbers = json.loads((tmp_path / "figures" / "figures.json").read_text())
    assert [(entry["label"], entry["seed"]) for entry in numbers["features"]] == [("E2E", 0), ("RepL", 0)]
    for name in ("features.svg", "feature_maps.png"):
        assert (tmp_path / "figures" / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "There is no run at nowhere"),
        (["RUNS/repl/seed-0"], "was trained with RepL (repl), so it is not the full model"),
        (["RUNS/e2e/seed-0", "--samples", "10", "--batch-size", "8"], "Write --batch-size 2"),
        (["RUNS/e2e/seed-0", "--targets", "layer9.1"], "'layer9.1' is not a block"),
    ],
)
def test_what_cannot_be_analysed_is_told(runs: Path, arguments: list[str], message: str) -> None:
    assert message in call("analyze", *(word.replace("RUNS", str(runs)) for word in arguments), code=2)
