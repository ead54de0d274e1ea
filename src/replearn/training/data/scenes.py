"""Data sets of whole pictures, as detectors and segmenters learn from them: files, and what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, eq=False)
class Scene:
    """One picture and the boxes in it, without crowds: float32 (n, 4) corners x0, y0, x1, y1 and labels from 0."""

    number: int  # the picture's id in the annotation file
    path: Path
    height: int
    width: int
    boxes: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class DetectionSet:
    """Pictures with boxes. `truth` is the test part as COCO's own annotation data, crowds included."""

    name: str
    categories: tuple[tuple[int, str], ...]  # the id in the file and the name, by label
    train: tuple[Scene, ...] = field(repr=False)
    test: tuple[Scene, ...] = field(repr=False)
    truth: Mapping[str, Any] = field(repr=False)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    unit = "images"
    classes = "classes"

    @property
    def num_classes(self) -> int:
        return len(self.categories)

    @property
    def num_train(self) -> int:
        return len(self.train)

    @property
    def num_test(self) -> int:
        return len(self.test)


@dataclass(frozen=True)
class Pair:
    """A picture and its mask, which has a class at every pixel."""

    image: Path
    mask: Path


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentationSet:
    """Pictures with masks. `numbers` says for each of a mask's 256 values which class it is."""

    name: str
    class_names: tuple[str, ...]
    numbers: Tensor = field(repr=False)  # int16 (256,): a class, VOID, or UNKNOWN for a value that may not occur
    train: tuple[Pair, ...] = field(repr=False)
    test: tuple[Pair, ...] = field(repr=False)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    unit = "images"
    classes = "classes"

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def num_train(self) -> int:
        return len(self.train)

    @property
    def num_test(self) -> int:
        return len(self.test)


VOID = 255  # a pixel that does not count
UNKNOWN = -1  # a value that no mask of the set may hold
