"""Overall accuracy, mean accuracy and mean IoU of a confusion matrix."""

from __future__ import annotations

import torch
from torch import Tensor


def confusion(labels: Tensor, said: Tensor, num_classes: int) -> Tensor:
    """How often each class (row) was taken for each (column); labels below 0 don't count."""
    real = labels >= 0
    places = labels[real] * num_classes + said[real]
    return torch.bincount(places, minlength=num_classes**2).view(num_classes, num_classes)


def segmentation_metrics(matrix: Tensor) -> dict[str, float]:
    """The paper's three numbers in percent; a class that neither is there nor was said is left out of the means.

    >>> segmentation_metrics(torch.tensor([[3, 1], [0, 0]]))
    {'iou': 37.5, 'overall': 75.0, 'mean': 75.0}
    """
    counts = matrix.double()
    right, there, said = counts.diag(), counts.sum(1), counts.sum(0)
    union = there + said - right
    iou = (right / union)[union > 0]
    recall = (right / there)[there > 0]
    overall = right.sum() / counts.sum()
    measures = {"iou": iou.mean(), "overall": overall, "mean": recall.mean()}
    return {name: 100 * float(value) if counts.sum() else 0.0 for name, value in measures.items()}
