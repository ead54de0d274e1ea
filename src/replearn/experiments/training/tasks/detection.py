"""Detection: boxes with a class and a score, judged by COCO's mean average precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import data as data_room
from ..coco_metrics import coco_metrics, need_pycocotools, write_results_file
from ..data.masks import read_scene
from ..data.scenes import Defects, DetectionSet, Scene
from ..detection_batches import Batch, DetectionBatches
from ..examples import box_examples
from ..metrics import Metric
from ..picture_store import PictureStore
from ..pretrained import start_backbone_
from ..processes import Processes
from ..recipe import Augment
from ..scene_models import detector
from .base import Task

if TYPE_CHECKING:
    from ..run import RunSpec

RESULTS = "predictions.json"  # what was found in the test pictures, as a COCO results file
EXAMPLES = 4


class Detection(Task):
    name = "detection"
    metric = Metric(name="map", unit="%")
    also = (Metric(name="ap50", unit="%"), Metric(name="ap75", unit="%"))

    batches: DetectionBatches
    defects: Defects
    started: str = ""

    @classmethod
    def open(cls, spec: RunSpec, device: torch.device, processes: Processes, shared: dict[Any, Any]) -> Detection:
        need_pycocotools()  # told before an epoch is trained
        task = cls(spec, device, processes)
        recipe = spec.recipe
        key = (spec.data, str(spec.data_root), recipe.bad_data, recipe.detection.keep_empty)
        if key not in shared:
            defects = Defects(recipe.bad_data)
            loaded = data_room.load(spec.data, spec.data_root, defects=defects)
            found = data_room.expect(DetectionSet, loaded, cls.name)
            if not recipe.detection.keep_empty:
                found = without_empty(found)
            stores = [
                PictureStore(_Reader(scenes), len(scenes), device, defects) for scenes in (found.train, found.test)
            ]
            shared[key] = found, *stores, defects
        found, train, test, task.defects = shared[key]
        flip = recipe.augment.get(spec.data, Augment()).flip
        task.batches = DetectionBatches(found, train, test, processes, recipe.batch_size, flip=flip, device=device)
        shapes = {(scene.height, scene.width) for scene in found.train}
        task.batches.one_shape = len(shapes) == len(recipe.detection.min_size) == 1
        return task

    def build(self) -> nn.Module:
        data = self.batches.data
        model = detector(
            self.recipe.model,
            num_classes=data.num_classes,
            settings=self.recipe.detection,
            mean=data.mean,
            std=data.std,
        )
        model.channels_last = self.recipe.channels_last  # type: ignore[assignment]
        if self.spec.pretrained is not None:
            self.started = start_backbone_(model, self.spec.pretrained)
        return model

    def notes(self) -> list[str]:
        return [*([self.started] if self.started else []), *self.defects.notes()]

    def example(self) -> list[Tensor]:
        side = self.recipe.detection.min_size[-1]
        return [torch.zeros(3, side, min(side * 4 // 3, self.recipe.detection.max_size), device=self.device)]

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        images, targets = batch
        loss: Tensor = sum(model(images, targets).values())
        with torch.no_grad():
            mean = loss.detach().float()
            sums = torch.stack([mean * len(images), torch.full_like(mean, len(images))])
        return loss, sums

    def parts(self, batch: Batch, count: int) -> Iterator[Batch]:
        images, targets = batch
        size = -(-len(images) // count)
        for start in range(0, len(images), size):
            yield images[start : start + size], targets[start : start + size]

    def evaluate(self, model: nn.Module, precision: AbstractContextManager[Any]) -> dict[str, float]:
        found: list[dict[str, Any]] = []
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        seen: list[int] = []
        for scenes, (images, targets) in self.batches.test(self.processes):
            with precision:
                losses, boxes = model(images, targets)
            real = [place for place, scene in enumerate(scenes) if scene.number >= 0]
            sums += sums.new_tensor([float(sum(losses.values())) * len(real), len(real)])
            seen += [scenes[place].number for place in real]
            for place in real:
                found += self.as_results(scenes[place], boxes[place])
        found, seen = self.gathered(found), self.gathered(seen)
        if self.processes.leads:
            write_results_file(self.spec.out / RESULTS, found)
        loss, count = self.processes.total(sums).tolist()

        measures = coco_metrics(only(self.batches.data.truth, seen), found)
        return {"test_loss": loss / max(1, count), **{f"test_{name}": value for name, value in measures.items()}}

    def as_results(self, scene: Scene, found: dict[str, Tensor]) -> list[dict[str, Any]]:
        """What was found in one picture, as a COCO results file holds it."""
        corners = found["boxes"].float().cpu()
        boxes = torch.cat([corners[:, :2], corners[:, 2:] - corners[:, :2]], dim=1)
        numbers = [number for number, _ in self.batches.data.categories]
        return [
            {
                "image_id": scene.number,
                "category_id": numbers[label],
                "bbox": [round(value, 3) for value in box],
                "score": round(score, 5),
            }
            for box, label, score in zip(
                boxes.tolist(), found["labels"].tolist(), found["scores"].tolist(), strict=True
            )
        ]

    def gathered(self, mine: list[Any]) -> list[Any]:
        """The lists of all processes as one, in every process."""
        if self.processes.world == 1:
            return mine
        parts: list[Any] = [None] * self.processes.world
        dist.all_gather_object(parts, mine)
        return [entry for part in parts for entry in part]

    def keep(self, model: nn.Module, precision: AbstractContextManager[Any]) -> None:
        names = [name for _, name in self.batches.data.categories]
        shown = self.batches.examples(EXAMPLES)
        with precision:
            found = [model([image])[0] for image, _ in shown]
        box_examples(self.spec.out, [(image, truth) for image, truth in shown], found, names)
        if self.defects.found:
            (self.spec.out / "skipped.txt").write_text("\n".join(self.defects.found) + "\n", encoding="utf-8")


class _Reader:
    """Reads a scene by number; an object and not a closure, so that worker processes can be given it."""

    def __init__(self, scenes: tuple[Scene, ...]) -> None:
        self.scenes = scenes

    def __call__(self, number: int) -> tuple[Tensor, ...]:
        return read_scene(self.scenes[number])


def without_empty(data: DetectionSet) -> DetectionSet:
    """The set without training pictures that have no box, as torchvision's reference trains."""
    return replace(data, train=tuple(scene for scene in data.train if len(scene.labels)))


def only(truth: Any, seen: list[int]) -> dict[str, Any]:
    """The truth about the pictures that were looked at: a broken one counts neither way."""
    known = set(seen)
    return {
        "images": [entry for entry in truth["images"] if entry["id"] in known],
        "annotations": [entry for entry in truth["annotations"] if entry["image_id"] in known],
        "categories": truth["categories"],
    }
