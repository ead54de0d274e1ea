"""Detection: COCO's metrics, the detector against torchvision's own, and training through the engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import narrow
import pytest
import torch
from scenes import few_pictures, write_coco  # noqa: F401
from test_engine import measured, same_checkpoints, stopped_and_resumed

from replearn import ReplearnError, deploy
from replearn.deployment.exporting import export
from replearn.experiments import recipes
from replearn.experiments.training.compare import compare
from replearn.experiments.training.comparison_table import comparison_table
from replearn.experiments.training.fit import fit
from replearn.experiments.training.processes import Processes
from replearn.experiments.training.recipe import Detection, Recipe
from replearn.experiments.training.results import read_result
from replearn.experiments.training.run import RunSpec
from replearn.experiments.training.scene_models import detector
from replearn.experiments.training.tasks.detection import Detection as DetectionTask
from replearn.experiments.training.tasks.detection import coco_metrics
from replearn.experiments.training.trained import read_trained

narrow.register()


SMALL = Detection(min_size=64, max_size=96)


# ---- metrics ------------------------------------------------------------------------------------


def made_up(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Random truth with crowds, and findings of which many are near the truth, with equal scores among them."""
    generator = torch.Generator().manual_seed(seed)

    def chance(*shape: int) -> Any:
        return torch.rand(*shape, generator=generator).tolist()

    truth: dict[str, Any] = {"images": [{"id": n} for n in range(6)], "annotations": [], "categories": []}
    truth["categories"] = [{"id": n, "name": str(n)} for n in (3, 5, 9)]
    found = []
    for picture in range(5):  # the sixth has nothing in it, and something is found there
        for x, y, w, h, kind in chance(7, 5):
            box = [50 * x, 50 * y, 8 + 20 * w, 8 + 20 * h]
            entry = {"image_id": picture, "category_id": (3, 5)[kind > 0.6], "bbox": box, "area": box[2] * box[3]}
            truth["annotations"].append({**entry, "id": len(truth["annotations"]) + 1, "iscrowd": int(kind > 0.9)})
            for dx, dy, score in chance(3, 3):
                near = [box[0] + 6 * dx - 3, box[1] + 6 * dy - 3, box[2], box[3]]
                found.append({**entry, "bbox": near, "score": round(score, 1)})
    found.append({"image_id": 5, "category_id": 3, "bbox": [1, 1, 5, 5], "score": 0.95})
    return truth, found


def test_boxes_are_judged_as_coco_does_and_a_perfect_answer_is_100() -> None:
    truth, found = made_up(0)
    measured = coco_metrics(truth, found)
    assert 0 < measured["map"] < measured["ap50"] < 100
    perfect = [{**entry, "score": 0.9} for entry in truth["annotations"] if not entry["iscrowd"]]
    assert coco_metrics(truth, perfect) == pytest.approx({"map": 100, "ap50": 100, "ap75": 100})
    assert coco_metrics(truth, []) == {"map": 0, "ap50": 0, "ap75": 0}
    assert coco_metrics({**truth, "annotations": []}, perfect) == {"map": 0, "ap50": 0, "ap75": 0}


# ---- the detector -------------------------------------------------------------------------------


def small() -> Any:
    torch.manual_seed(0)
    settings = replace(SMALL, score_threshold=0.0, max_detections=20)
    return detector("retinanet_resnet_narrow", num_classes=3, settings=settings)


def pictures() -> tuple[list[torch.Tensor], list[dict[str, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    images = [torch.rand(3, 64, 80, generator=generator), torch.rand(3, 72, 64, generator=generator)]
    boxes = {"boxes": torch.tensor([[4.0, 6.0, 40.0, 50.0]]), "labels": torch.tensor([2])}
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    return images, [boxes, empty]


def test_it_computes_what_torchvision_s_code_computes() -> None:
    from torchvision.models.detection.retinanet import RetinaNet

    model, (images, targets) = small(), pictures()
    with torch.no_grad():
        losses = model(images, targets)
        theirs = RetinaNet.forward(model, images, targets)
        model.eval()
        again, found = model(images, targets)
        expected = RetinaNet.forward(model, images)
    torch.testing.assert_close(losses, theirs)
    assert again.keys() == losses.keys()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_boxes_are_exact_under_bfloat16() -> None:
    model, (images, _) = small().eval(), pictures()
    seen: list[torch.Tensor] = []
    plain = model.postprocess_detections

    def look(outputs: Any, anchors: Any, sizes: Any) -> Any:
        seen.append(torch.cat(anchors[0]))
        return plain(outputs, anchors, sizes)

    model.postprocess_detections = look
    with torch.no_grad():
        model(images)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(images)
    assert seen[1].dtype == torch.float32
    assert torch.equal(seen[0], seen[1])
    assert found[0]["boxes"].dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        (
            "retinanet_vgg",
            Detection(),
            r"There is no detector 'retinanet_vgg'. Write retinanet_BACKBONE with one of .*resnet50",
        ),
        (
            "retinanet_resnet18",
            Detection(min_size=900, max_size=800),
            r"min_size=900, detection.max_size=800",
        ),
    ],
)
def test_a_detector_that_can_t_be_built_is_told(name: str, settings: Detection, told: str) -> None:
    with pytest.raises(ReplearnError, match=told):
        detector(name, num_classes=2, settings=settings)


# ---- training -----------------------------------------------------------------------------------


def tiny(**changes: Any) -> Recipe:
    made = recipes.recipe("bccd_retinanet")
    rows = {
        "model": "retinanet_resnet_narrow",
        "variants": recipes.recipe("t2_resnet34").variants,
        "epochs": 2,
        "batch_size": 2,
        "detection": SMALL,
        "precision": "float32",
    }
    return replace(made, **(rows | changes))  # type: ignore[arg-type]


def spec(out: Path, root: Path, label: str = "RepL first=2", **changes: Any) -> RunSpec:
    recipe = tiny(**changes)
    return RunSpec(recipe=recipe, variant=recipe.variant(label), data="bccd", seed=0, out=out, data_root=root)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_coco(folder / "bccd", {"train": 5, "test": 3})
    return folder


@pytest.fixture(scope="module")
def runs(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """E2E and RepL, trained to the end."""
    out = tmp_path_factory.mktemp("runs")
    for label, name in (("E2E", "e2e"), ("RepL first=2", "repl-first-2")):
        fit([spec(out / "bccd" / name / "seed-0", root, label)], device="cpu")
    return out


def test_both_rows_train_and_measure_and_write_what_was_found(runs: Path) -> None:
    e2e, repl = (read_result(runs / "bccd" / name / "seed-0" / "result.json") for name in ("e2e", "repl-first-2"))
    for result in (e2e, repl):
        assert result.finished
        assert {"train_loss", "test_loss", "test_map", "test_ap50", "test_ap75"} == set(result.last.measures)
        assert result.flops > 0
    assert repl.plan is not None
    assert [t["name"] for t in repl.plan["targets"]] == [f"backbone.body.layer{n}.1" for n in (1, 2, 3, 4)]
    assert repl.parameters == repl.plan["parameters_after"] < e2e.parameters
    assert "AP50  AP75" in comparison_table(compare([e2e, repl])[0])
    found = json.loads((runs / "bccd" / "e2e" / "seed-0" / "predictions.json").read_text())
    assert {entry["category_id"] for entry in found} <= {1, 7, 90}
    assert {entry["image_id"] for entry in found} <= {100, 101, 102}


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(runs: Path, root: Path, tmp_path: Path) -> None:
    resumed = stopped_and_resumed(spec(tmp_path, root), 3)
    whole = runs / "bccd" / "repl-first-2" / "seed-0"
    assert measured(resumed) == measured(read_result(whole / "result.json"))
    same_checkpoints(whole, tmp_path)


def test_accumulated_parts_train_too(root: Path, tmp_path: Path) -> None:
    made = spec(tmp_path, root, epochs=1, accumulate=2)
    (result,) = fit([made], device="cpu")
    assert result.last.measures["train_loss"] > 0


def test_a_trained_detector_is_exported_up_to_what_its_head_says(runs: Path, tmp_path: Path) -> None:
    run = read_trained(runs / "bccd" / "repl-first-2" / "seed-0")
    assert run.example.shape == (2, 3, 64, 96)
    done = export(deploy(run.model, run.example), tmp_path / "detector.safetensors", run.example)
    assert done.batch_sizes == (1, 3)
    seen: list[Any] = []
    run.model.head.register_forward_hook(lambda head, given, made: seen.append(made))  # type: ignore[union-attr]
    image = torch.rand(3, 64, 96)
    with torch.no_grad():
        run.model([image])
        said = run.model(image[None])
    torch.testing.assert_close(said, seen[0])


def test_cudnn_tries_its_algorithms_where_all_pictures_are_of_one_size(root: Path, tmp_path: Path) -> None:
    mixed = DetectionTask(spec(tmp_path, root), torch.device("cpu"), Processes(), {})
    assert not mixed.batches.one_shape
    write_coco(tmp_path / "bccd", {"train": 1, "test": 1})
    one = DetectionTask(spec(tmp_path, tmp_path, batch_size=1), torch.device("cpu"), Processes(), {})
    assert one.batches.one_shape
