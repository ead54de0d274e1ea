"""Image classification: one label an image, top-1 and top-5 accuracy."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .. import data as datasets
from ..architectures import architecture
from ..data import ImageSet, StreamedSet
from ..image_batches import DeviceBatches, DeviceImages, ImageBatches, StreamBatches
from ..metrics import Metric
from ..pretrained import load_pretrained_
from ..recipe import Augment, Recipe
from .base import Task, sums_of


class Classification(Task):
    name = "classification"
    metric = Metric(name="accuracy", unit="%")
    also = (Metric(name="top5", unit="%"),)
    counted = ("train_accuracy",)

    batches: ImageBatches

    @property
    def augment(self) -> Augment:
        return self.recipe.augment.get(self.spec.data, Augment())

    def reading(self) -> tuple[Any, ...]:
        return self.recipe.classes, self.augment

    def read(self) -> DeviceImages | StreamedSet:
        loaded = datasets.load(self.spec.data, self.spec.data_root)
        if self.recipe.classes:
            loaded = datasets.expect(ImageSet, loaded, "a part of the classes").with_classes(self.recipe.classes)
        if isinstance(loaded, StreamedSet):
            return loaded
        return DeviceImages(datasets.expect(ImageSet, loaded, self.name), self.augment, self.device)

    def take(self, data: DeviceImages | StreamedSet) -> None:
        if isinstance(data, StreamedSet):
            size = self.recipe.batch_size
            self.batches = StreamBatches(data, self.augment, self.processes, size, self.device)
        else:
            self.batches = DeviceBatches(data, self.processes, self.recipe.batch_size)
        self.shape = self.batches.shape

    @staticmethod
    def fresh(recipe: Recipe, classes: int, channels: int, size: int) -> nn.Module:
        return architecture(recipe.model, num_classes=classes, channels=channels, size=size)

    @staticmethod
    def inputs(recipe: Recipe, channels: int, size: int) -> Tensor:
        return torch.randn(2, channels, size, size)

    def start_(self, model: nn.Module, source: str) -> None:
        outputs = [self.spec.data, list(self.recipe.classes)]
        load_pretrained_(model, source, outputs=outputs, name=self.recipe.model)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        logits = model(self.formatted(images))
        loss = self.batches.loss(logits, labels, self.recipe.label_smoothing)
        with torch.no_grad():
            hits = (logits.detach().argmax(1) == labels).sum().float()
            return loss, sums_of(loss, len(labels), hits)

    def evaluate(self, model: nn.Module, precision: AbstractContextManager[Any]) -> dict[str, float]:
        sums = torch.zeros(4, device=self.device)
        for images, labels in self.batches.test():
            with precision:
                logits = model(self.formatted(images)).float()
            top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            found = [cross_entropy(logits, labels, reduction="sum"), top[:, 0].sum(), top.sum()]
            sums += torch.stack([*(value.float() for value in found), sums.new_tensor(labels.shape[0])])
        loss, first, five, seen = self.processes.total(sums).tolist()
        return {"test_loss": loss / seen, "test_accuracy": 100 * first / seen, "test_top5": 100 * five / seen}
