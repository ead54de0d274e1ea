"""Detection: boxes with a class and a score, judged by COCO's mean average precision."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....errors import library
from ..data import DetectionSet
from ..data.scenes import Scene
from ..metrics import Metric
from ..picture_batches import Batch, DetectionBatches
from ..recipe import Recipe
from ..results import write_atomically
from ..scene_models import detector
from .base import PictureTask, sums_of

RESULTS = "predictions.json"  # what was found in the test pictures, as a COCO results file
NAMES = ("map", "ap50", "ap75")


class Detection(PictureTask):
    name = "detection"
    metric = Metric(name="mAP", short="map", unit="%")
    also = (Metric(name="AP50", short="ap50", unit="%"), Metric(name="AP75", short="ap75", unit="%"))
    kind = DetectionSet
    batches_of = DetectionBatches

    batches: DetectionBatches

    def read(self) -> Any:
        library("pycocotools", "scenes")  # raises before an epoch is trained
        return super().read()

    @staticmethod
    def fresh(recipe: Recipe, classes: int, channels: int, size: int) -> nn.Module:
        model = detector(recipe.model, num_classes=classes, settings=recipe.detection)
        model.channels_last = recipe.channels_last  # type: ignore[assignment]
        return model

    @staticmethod
    def inputs(recipe: Recipe, channels: int, size: int) -> Tensor:
        side = recipe.detection.min_size
        return torch.rand(2, channels, *(-(-length // 32) * 32 for length in (side, side * 4 // 3)))

    def example(self) -> list[Tensor]:
        side = self.recipe.detection.min_size
        return [torch.zeros(3, side, min(side * 4 // 3, self.recipe.detection.max_size), device=self.device)]

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        images, targets = batch
        loss: Tensor = sum(model(images, targets).values())
        return loss, sums_of(loss, len(images))

    def parts(self, batch: Batch, count: int) -> Iterator[Batch]:
        images, targets = batch
        size = -(-len(images) // count)
        for start in range(0, len(images), size):
            yield images[start : start + size], targets[start : start + size]

    def evaluate(self, model: nn.Module, precision: AbstractContextManager[Any]) -> dict[str, float]:
        found: list[dict[str, Any]] = []
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for scenes, (images, targets) in self.batches.test():
            with precision:
                losses, boxes = model(images, targets)
            sums += sums.new_tensor([float(sum(losses.values())) * len(scenes), len(scenes)])
            found += [e for scene, box in zip(scenes, boxes, strict=True) for e in self.as_results(scene, box)]
        found = self.gathered(found)
        if self.processes.leads:
            write_atomically(self.spec.out / RESULTS, json.dumps(found))
        loss, count = self.processes.total(sums).tolist()
        measures = coco_metrics(self.batches.data.truth, found)
        return {"test_loss": loss / count, **{f"test_{name}": value for name, value in measures.items()}}

    def as_results(self, scene: Scene, found: dict[str, Tensor]) -> list[dict[str, Any]]:
        """What was found in one picture, as a COCO results file holds it."""
        corners = found["boxes"].float().cpu()
        boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1).tolist()
        return [
            {
                "image_id": scene.number,
                "category_id": self.batches.data.category_ids[label],
                "bbox": [round(value, 3) for value in box],
                "score": round(score, 5),
            }
            for box, label, score in zip(boxes, found["labels"].tolist(), found["scores"].tolist(), strict=True)
        ]

    def gathered(self, mine: list[Any]) -> list[Any]:
        """The lists of all processes as one, in every process."""
        if self.processes.world == 1:
            return mine
        parts: list[Any] = [None] * self.processes.world
        dist.all_gather_object(parts, mine)
        return [entry for part in parts for entry in part]


def coco_metrics(truth: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """mAP, AP50 and AP75 in percent; 0 without detections or without annotations.

    `truth` is COCO's annotation data, `found` the list of a COCO results file: image_id, category_id, bbox
    (x, y, width, height), score.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    if not found or not truth["annotations"]:
        return dict.fromkeys(NAMES, 0.0)
    with redirect_stdout(io.StringIO()):  # it prints as it goes
        coco = COCO()
        coco.dataset = {"info": {}, **truth, "annotations": [dict(entry) for entry in truth["annotations"]]}
        coco.createIndex()
        run = COCOeval(coco, coco.loadRes([dict(entry) for entry in found]), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return {name: 100 * max(0.0, float(value)) for name, value in zip(NAMES, run.stats[:3], strict=True)}
