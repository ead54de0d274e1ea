"""Image classification: one label an image, top-1 and top-5 accuracy."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .. import data as data_room
from ..architectures import architecture
from ..data import ImageSet, StreamedSet
from ..image_batches import DeviceBatches, DeviceImages, ImageBatches, StreamBatches
from ..metrics import Metric
from ..pretrained import load_pretrained_
from ..processes import Processes
from ..recipe import Augment
from .base import Task, sums_of

if TYPE_CHECKING:
    from ..run import RunSpec


class Classification(Task):
    name = "classification"
    metric = Metric(name="accuracy", unit="%")
    also = (Metric(name="top5", unit="%"),)
    counted = ("train_accuracy",)

    batches: ImageBatches

    @classmethod
    def open(
        cls, spec: RunSpec, device: torch.device, processes: Processes, shared: dict[Any, Any]
    ) -> Classification:
        task = cls(spec, device, processes)
        recipe = spec.recipe
        augment = recipe.augment.get(spec.data, Augment())
        key = (spec.data, str(spec.data_root), recipe.classes, augment)
        if key not in shared:
            loaded = data_room.load(spec.data, spec.data_root)
            if recipe.classes:
                loaded = data_room.expect(ImageSet, loaded, "a part of the classes").with_classes(recipe.classes)
            if isinstance(loaded, StreamedSet):
                task.batches = StreamBatches(loaded, augment, processes, recipe.batch_size, device)
                return task
            shared[key] = DeviceImages(data_room.expect(ImageSet, loaded, cls.name), augment, device)
        task.batches = DeviceBatches(shared[key], processes, recipe.batch_size, device)
        return task

    def build(self) -> nn.Module:
        held = self.batches
        model = architecture(
            self.recipe.model, num_classes=held.num_classes, channels=held.channels, size=held.size
        )
        if self.spec.pretrained is not None:
            outputs = [self.spec.data, list(self.recipe.classes)]
            load_pretrained_(model, self.spec.pretrained, outputs=outputs, name=self.recipe.model)
        return model

    def example(self) -> Tensor:
        held = self.batches
        return torch.zeros(1, held.channels, held.size, held.size, device=self.device)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        logits = self.logits(model, images)
        loss = self.batches.loss(logits, labels, self.recipe.label_smoothing)
        with torch.no_grad():
            hits = (logits.detach().argmax(1) == labels).sum().float()
            return loss, sums_of(loss, len(labels), hits)

    def evaluate(self, model: nn.Module, precision: AbstractContextManager[Any]) -> dict[str, float]:
        sums = torch.zeros(4, device=self.device)
        for images, labels in self.batches.test(self.processes):
            with precision:
                logits = self.logits(model, images).float()
            real = labels >= 0  # a stream fills up its last batches with images that do not count
            logits, labels = logits[real], labels[real]
            top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            found = [cross_entropy(logits, labels, reduction="sum"), top[:, 0].sum(), top.sum()]
            sums += torch.stack([*(value.float() for value in found), sums.new_tensor(labels.shape[0])])
        loss, first, five, seen = self.processes.total(sums).tolist()
        return {"test_loss": loss / seen, "test_accuracy": 100 * first / seen, "test_top5": 100 * five / seen}

    def logits(self, model: nn.Module, images: Tensor) -> Tensor:
        """What the model says; Hugging Face models say it in a field of an object."""
        if self.recipe.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        made = model(images)
        logits: Tensor = made if isinstance(made, Tensor) else made.logits
        return logits
