"""Segmentation: crops, metrics, and training through the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import narrow
import pytest
import torch
from scenes import few_pictures, write_camvid, write_cityscapes  # noqa: F401
from test_engine import measured, same_checkpoints, stopped_and_resumed
from torchvision.models.segmentation import deeplabv3_resnet50

from replearn import ReplearnError
from replearn.experiments import recipes
from replearn.experiments.training.data import IGNORED
from replearn.experiments.training.fit import fit
from replearn.experiments.training.processes import Processes
from replearn.experiments.training.recipe import Recipe, Segmentation
from replearn.experiments.training.run import RunSpec
from replearn.experiments.training.scene_models import segmenter
from replearn.experiments.training.tasks.segmentation import SemanticSegmentation, confusion, segmentation_metrics

narrow.register()
CPU = torch.device("cpu")


def tiny(**changes: Any) -> Recipe:
    settings: dict[str, Any] = {
        "model": "deeplabv3_resnet_narrow_bottleneck",
        "data": ("camvid", "cityscapes"),
        "epochs": 2,
        "batch_size": 4,
        "segmentation": Segmentation(crop=48),
        "precision": "float32",
    }
    return replace(recipes.recipe("camvid_deeplabv3"), **(settings | changes))


def spec(out: Path, root: Path, label: str = "RepL", data: str = "camvid", **changes: Any) -> RunSpec:
    recipe = tiny(**changes)
    return RunSpec(recipe=recipe, variant=recipe.variant(label), data=data, seed=0, out=out, data_root=root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_camvid(tmp_path / "data" / "camvid")
    return tmp_path / "data"


def task_of(root: Path, **changes: Any) -> SemanticSegmentation:
    task = SemanticSegmentation(spec(root / "out", root, **changes), CPU, Processes(), {})
    assert isinstance(task, SemanticSegmentation)
    return task


# ---- models and metrics -------------------------------------------------------------------------


def test_the_segmenter_is_torchvision_s() -> None:
    with torch.device("meta"):
        ours = segmenter("deeplabv3_resnet50", num_classes=5, auxiliary=True).state_dict()
        theirs = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=5, aux_loss=True).state_dict()
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}


@pytest.mark.parametrize(
    ("name", "auxiliary", "told"),
    [
        ("deeplabv3_resnet18", False, "deeplabv3_resnet18 can't be built: .*Use a backbone of bottlenecks"),
        ("deeplabv3plus_resnet18", True, "deeplabv3plus_resnet18 has no auxiliary head: write segmentation.aux"),
        ("unet_resnet50", False, "There is no segmenter 'unet_resnet50'. Write deeplabv3_BACKBONE or"),
    ],
)
def test_a_segmenter_that_can_t_be_built_is_told(name: str, auxiliary: bool, told: str) -> None:
    with pytest.raises(ReplearnError, match=told):
        segmenter(name, num_classes=3, auxiliary=auxiliary)


def test_deeplabv3plus_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "segmentation_models_pytorch", None)
    with pytest.raises(
        ReplearnError, match=r"needs segmentation_models_pytorch: pip install 'replearn\[scenes\]'"
    ):
        segmenter("deeplabv3plus_resnet50", num_classes=3)


def test_metrics_are_scikit_learn_s() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    generator = torch.Generator().manual_seed(0)
    labels, said = (torch.randint(0, 5, (3, 20, 30), generator=generator) for _ in range(2))
    labels[0, :4] = IGNORED
    said = torch.where(torch.rand(labels.shape, generator=generator) < 0.6, labels.clamp(min=0), said)
    found = segmentation_metrics(confusion(labels, said, 5))
    real = labels >= 0
    right, answers = labels[real].numpy(), said[real].numpy()
    assert found["overall"] == pytest.approx(100 * sklearn.accuracy_score(right, answers))
    assert found["mean"] == pytest.approx(100 * sklearn.balanced_accuracy_score(right, answers))
    assert found["iou"] == pytest.approx(100 * sklearn.jaccard_score(right, answers, average="macro"))


# ---- batches ------------------------------------------------------------------------------------


def test_a_crop_at_scale_one_is_the_picture_itself_and_its_flip_is_mirrored(root: Path) -> None:
    batches = task_of(root, segmentation=Segmentation(crop=64)).batches
    image, mask = batches._train._held[2]
    rows = torch.tensor([[2.0, 1.0, 0.0, 0.5, 0.0], [2.0, 1.0, 0.0, 0.5, 1.0]])
    images, labels = batches.cut(rows, [])
    expected = batches.normalised(image[None])[0, :, :64, 8:72]
    torch.testing.assert_close(images[0], expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(images[1], expected.flip(-1), rtol=1e-4, atol=1e-3)
    right = mask[:64, 8:72].long()
    assert torch.equal(labels[0], torch.where(right == 255, IGNORED, right))
    assert torch.equal(labels[1], labels[0].flip(-1))


def test_what_lies_outside_a_picture_does_not_count(root: Path) -> None:
    batches = task_of(root, segmentation=Segmentation(crop=64)).batches
    images, labels = batches.cut(torch.tensor([[0.0, 0.5, 0.0, 0.0, 0.0]]), [])
    assert bool((labels[0, 32:] == IGNORED).all())
    assert bool((labels[0, :, 40:] == IGNORED).all())
    assert bool((labels[0, :29, :39] != IGNORED).all())
    assert not images[0, :, 34:].any()  # the mean colour


def test_pictures_of_one_size_and_of_several_give_the_same_batches(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = task_of(root).batches
    assert held.fixed
    monkeypatch.setattr("replearn.experiments.training.picture_batches.HELD_AT_MOST", 0)
    streamed = task_of(root).batches
    assert not streamed.fixed
    for batches in (held, streamed):
        batches.start_epoch(3, 1, first_step=1)
        batches.advance(1)
    torch.testing.assert_close(held.current(), streamed.current())
    one, other = (list(batches.test()) for batches in (held, streamed))
    assert (len(one), len(other)) == (1, 3)  # a stream can not know that all are of one size


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (Segmentation(crop=50), "segmentation.crop=50: write a multiple of 16"),
        (Segmentation(scale=(2.0, 0.5)), r"segmentation.scale=\[2.0, 0.5\]: write the least and the most"),
    ],
)
def test_settings_that_can_t_be_are_told(root: Path, settings: Segmentation, told: str) -> None:
    with pytest.raises(ReplearnError, match=told):
        task_of(root, segmentation=settings)


def test_a_picture_is_filled_up_to_what_the_model_takes(root: Path) -> None:
    task = task_of(root, model="deeplabv3plus_resnet18", segmentation=Segmentation(crop=48, auxiliary=0))
    model, images, seen = torch.nn.Conv2d(3, 11, 1), torch.randn(2, 3, 100, 70), []
    model.register_forward_hook(lambda module, given, made: seen.append(given[0].shape[-2:]))
    with torch.no_grad():
        torch.testing.assert_close(task.predict(model, images), model(images), rtol=1e-4, atol=1e-5)
    assert seen[0] == (112, 80)


# ---- training -----------------------------------------------------------------------------------


def test_it_learns_and_a_stopped_run_goes_on_as_if_nothing_had_happened(root: Path, tmp_path: Path) -> None:
    whole = fit([spec(tmp_path / "whole", root, epochs=4)], device="cpu")[0]
    assert whole.last.measures["train_loss"] < whole.epochs[0].measures["train_loss"]
    names = {"train_loss", "train_overall", "test_loss", "test_iou", "test_overall", "test_mean"}
    assert set(whole.last.measures) == names
    assert whole.plan is not None
    assert all(t["name"].startswith("backbone.layer") for t in whole.plan["targets"])
    resumed = stopped_and_resumed(spec(tmp_path / "stopped", root, epochs=4), 5)
    assert measured(resumed) == measured(whole)
    same_checkpoints(tmp_path / "whole", tmp_path / "stopped")


def test_mixed_sizes_train_and_a_broken_picture_is_named(tmp_path: Path) -> None:
    write_camvid(tmp_path / "data" / "camvid", mixed=True)
    changes: dict[str, Any] = {"epochs": 1, "batch_size": 3, "channels_last": True}
    plain = Segmentation(crop=48, auxiliary=0.0)
    (result,) = fit([spec(tmp_path / "out", tmp_path / "data", segmentation=plain, **changes)], device="cpu")
    assert result.finished
    (tmp_path / "data" / "camvid" / "train" / "005.png").write_bytes(b"broken")
    with pytest.raises(ReplearnError, match=r"005\.png is no picture that can be read"):
        fit([spec(tmp_path / "no", tmp_path / "data")], device="cpu")
    assert not (tmp_path / "no").exists()


def test_cityscapes_trains_with_the_data_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cityscapes(tmp_path / "data" / "cityscapes")
    monkeypatch.setattr("replearn.experiments.training.picture_batches.HELD_AT_MOST", 0)
    monkeypatch.setattr("replearn.experiments.training.picture_batches.default_workers", lambda: 0)
    made = spec(tmp_path / "out", tmp_path / "data", "E2E", "cityscapes", epochs=1, batch_size=2)
    (result,) = fit([made], device="cpu")
    assert result.finished
    assert 0 <= result.last.measures["test_iou"] <= 100


def test_a_data_set_of_another_kind_is_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ReplearnError, match="digits is a ImageSet, and segmentation learns from a SegmentationSet"
    ):
        SemanticSegmentation(spec(tmp_path, root, data="digits"), CPU, Processes(), {})
