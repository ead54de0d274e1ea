"""Semantic segmentation: a class for every pixel; the metric is the mean IoU."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from ..data import IGNORED, SegmentationSet
from ..metrics import Metric
from ..picture_batches import SegmentationBatches
from ..recipe import Recipe
from ..scene_models import logits_of, segmenter, stride_of
from .base import PictureTask, sums_of


class SemanticSegmentation(PictureTask):
    name = "segmentation"
    metric = Metric(name="mean IoU", short="iou", unit="%")
    also = (
        Metric(name="pixel accuracy", short="overall", unit="%"),
        Metric(name="mean accuracy", short="mean", unit="%"),
    )
    counted = ("train_overall",)
    kind = SegmentationSet
    batches_of = SegmentationBatches

    batches: SegmentationBatches

    @staticmethod
    def fresh(recipe: Recipe, classes: int, channels: int, size: int) -> nn.Module:
        return segmenter(recipe.model, num_classes=classes, auxiliary=recipe.segmentation.auxiliary > 0)

    @staticmethod
    def inputs(recipe: Recipe, channels: int, size: int) -> Tensor:
        return torch.randn(2, channels, recipe.segmentation.crop, recipe.segmentation.crop)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, labels = batch
        logits, auxiliary = logits_of(model(self.formatted(images)))
        loss = self.pixel_loss(logits, labels)
        if auxiliary is not None:
            loss = loss + self.recipe.segmentation.auxiliary * self.pixel_loss(auxiliary, labels)
        with torch.no_grad():
            real = (labels >= 0).sum().clamp(min=1)
            right = (logits.detach().argmax(1) == labels).sum() / real * len(images)
            return loss, sums_of(loss, len(images), right)

    def pixel_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean over pixels that count; 0 where a batch has none."""
        total = cross_entropy(
            logits.float(),
            labels,
            reduction="sum",
            ignore_index=IGNORED,
            label_smoothing=self.recipe.label_smoothing,
        )
        return total / (labels >= 0).sum().clamp(min=1)

    def evaluate(self, model: nn.Module, precision: AbstractContextManager[Any]) -> dict[str, float]:
        classes = self.batches.data.num_classes
        matrix = torch.zeros(classes, classes, dtype=torch.int64, device=self.device)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for images, labels in self.batches.test():
            with precision:
                logits = self.predict(model, images)
            loss = cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)
            sums += torch.stack([loss.double(), (labels >= 0).sum().double()])
            matrix += confusion(labels, logits.argmax(1), classes)
        loss_sum, count = self.processes.total(sums).tolist()
        measures = segmentation_metrics(self.processes.total(matrix))
        return {"test_loss": loss_sum / max(1, count)} | {f"test_{name}": v for name, v in measures.items()}

    def predict(self, model: nn.Module, images: Tensor) -> Tensor:
        """Logits of pictures of any size; where a model asks for multiples, filled up with the mean colour."""
        stride = stride_of(self.recipe.model)
        height, width = images.shape[-2:]
        images = pad(images, (0, -width % stride, 0, -height % stride))
        return logits_of(model(self.formatted(images)))[0][..., :height, :width].float()


def confusion(labels: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """How often each class (row) was taken for each (column); labels below 0 don't count."""
    real = labels >= 0
    places = labels[real] * num_classes + predicted[real]
    return torch.bincount(places, minlength=num_classes**2).view(num_classes, num_classes)


def segmentation_metrics(matrix: Tensor) -> dict[str, float]:
    """The paper's three numbers in percent; a class that without labels and predictions is left out.

    >>> segmentation_metrics(torch.tensor([[3, 1], [0, 0]]))
    {'iou': 37.5, 'overall': 75.0, 'mean': 75.0}
    """
    counts = matrix.double()
    right, actual, predicted = counts.diag(), counts.sum(1), counts.sum(0)
    union = actual + predicted - right
    iou = (right / union)[union > 0]
    recall = (right / actual)[actual > 0]
    overall = right.sum() / counts.sum()
    measures = {"iou": iou.mean(), "overall": overall, "mean": recall.mean()}
    return {name: 100 * float(value) if counts.sum() else 0.0 for name, value in measures.items()}
