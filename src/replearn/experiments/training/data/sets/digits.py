"""Handwritten digits, 8x8 and grey: 1,797 real images that come with scikit-learn, so nothing is downloaded.

They are the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI, 1998;
CC BY 4.0). It has no split of its own. Ours: 360 test images, 36 of each class, the first ones of
`stratified_order(labels, seed=0)`; the other 1,437 are for training, both in the original order. Pixels,
which are 0..16 there, are brought to 0..255. Images stay 8x8; a recipe may enlarge them.
"""

import gzip
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from .....errors import ReplearnError
from ..images import ImageSet, channel_statistics, stratified_order
from ..source import Root, Source


def load_digits(source: Source, root: Root = None) -> ImageSet:
    """The digits; the root is not looked at."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ReplearnError(f"{source.title} need scikit-learn, which is not installed. {source.how}")
    rows = read_table(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz")
    images = rows[:, :-1].reshape(-1, 1, 8, 8).mul(255 / 16).round().to(torch.uint8)
    labels = rows[:, -1].long()
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[stratified_order(labels, seed=0)[: source.num_test]] = True
    train, test = (images[~held], labels[~held]), (images[held], labels[held])
    return ImageSet(source.name, source.num_classes, *train, *test, *channel_statistics(train[0]))


def read_table(path: Path) -> Tensor:
    """64 pixels and the digit a row, from scikit-learn's file: importing scikit-learn takes seconds, this none."""
    try:
        with gzip.open(path, "rt") as lines:
            return torch.tensor([[float(value) for value in line.split(",")] for line in lines])
    except (OSError, ValueError) as error:
        raise ReplearnError(f"scikit-learn's digits can't be read: {error}. Install scikit-learn anew.") from error


DIGITS = Source(
    name="digits",
    title="scikit-learn's digits",
    load=load_digits,
    num_classes=10,
    shape=(1, 8, 8),
    num_train=1437,
    num_test=360,
    how="It comes with scikit-learn: pip install 'replearn[train]'.",
)
