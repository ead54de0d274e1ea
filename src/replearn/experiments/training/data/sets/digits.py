"""Handwritten digits, 8x8 and grey: 1,797 real images that come with scikit-learn, so nothing is downloaded.

They are the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI, 1998;
CC BY 4.0). It has no split of its own. Ours: 360 test images, 36 of each class, the first ones of
`stratified_order(labels, seed=0)`; the other 1,437 are for training, both in the original order. Pixels,
which are 0..16 there, are brought to 0..255. Images stay 8x8; a recipe may enlarge them.
"""

from __future__ import annotations

import gzip
import os
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from .....errors import ReplearnError
from ..base import ImageSet, stratified_order
from ..reading import channel_statistics
from ..source import Source

SOURCE = Source(
    name="digits",
    title="scikit-learn's digits",
    num_classes=10,
    shape=(1, 8, 8),
    num_train=1437,
    num_test=360,
    layouts=(),
    how="It comes with scikit-learn: pip install 'replearn[train]'.",
    bundled_with="sklearn",
)


def load(root: str | os.PathLike[str] | None = None, strict_counts: bool = True) -> ImageSet:
    """The digits; the root is not looked at."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ReplearnError(f"{SOURCE.title} need scikit-learn, which is not installed. {SOURCE.how}")
    table = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    rows = from_table(table) if table.is_file() else from_library()
    images = rows[:, :-1].reshape(-1, 1, 8, 8).mul(255 / 16).round().to(torch.uint8)
    labels = rows[:, -1].long()
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[stratified_order(labels, seed=0)[: SOURCE.num_test]] = True
    if strict_counts and len(labels) != SOURCE.num_train + SOURCE.num_test:
        raise ReplearnError(
            f"This scikit-learn brings {len(labels):,} digits, and 1,797 are expected; install scikit-learn anew."
        )
    mean, std = channel_statistics(images[~held])
    return ImageSet(
        name=SOURCE.name,
        num_classes=SOURCE.num_classes,
        train_images=images[~held],
        train_labels=labels[~held],
        test_images=images[held],
        test_labels=labels[held],
        mean=mean,
        std=std,
    )


def from_table(path: Path) -> Tensor:
    """64 pixels and the digit a row, from scikit-learn's file: importing scikit-learn takes seconds, this none."""
    with gzip.open(path, "rt") as lines:
        return torch.tensor([[float(value) for value in line.split(",")] for line in lines])


def from_library() -> Tensor:
    """The same through scikit-learn's door, should the file ever move."""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    pixels = torch.tensor(bundle.data, dtype=torch.float32)
    return torch.cat([pixels, torch.tensor(bundle.target, dtype=torch.float32)[:, None]], dim=1)
