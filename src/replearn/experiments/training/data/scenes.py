"""Data sets of whole pictures, as detectors and segmenters learn from them: files, and what is in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

from ....errors import ReplearnError

Policy = Literal["refuse", "skip"]
SHOWN = 5


class Defects:
    """Collects what is wrong. Under `refuse` the first defect is an error; under `skip` all are remembered."""

    def __init__(self, policy: Policy = "refuse") -> None:
        self.policy = policy
        self.found: list[str] = []

    def report(self, text: str) -> None:
        """Say one defect: what, in which file."""
        if self.policy == "refuse":
            raise ReplearnError(
                f"{text} Mend it, or write bad_data=skip in the recipe (--set bad_data=skip) to leave it out."
            )
        if text not in self.found:
            self.found.append(text)

    def notes(self) -> list[str]:
        """The defects for a result file: a count and the first few of them."""
        if not self.found:
            return []
        more = f" and {len(self.found) - SHOWN} more (skipped.txt)" if len(self.found) > SHOWN else ""
        return [f"left out as bad data: {' '.join(self.found[:SHOWN])}{more}"]


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


@dataclass(frozen=True)
class Pair:
    """A picture and its mask, which has a class at every pixel."""

    image: Path
    mask: Path


Item = TypeVar("Item", Scene, Pair)


@dataclass(frozen=True, eq=False, kw_only=True)
class PictureSet(ABC, Generic[Item]):
    """Pictures for training and for the test, by their files."""

    name: str
    train: tuple[Item, ...] = field(repr=False)
    test: tuple[Item, ...] = field(repr=False)
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    unit = "images"
    classes = "classes"

    @property
    @abstractmethod
    def num_classes(self) -> int: ...

    @property
    def num_train(self) -> int:
        return len(self.train)

    @property
    def num_test(self) -> int:
        return len(self.test)


@dataclass(frozen=True, eq=False, kw_only=True)
class DetectionSet(PictureSet[Scene]):
    """Pictures with boxes. `truth` is the test part as COCO's own annotation data, crowds included."""

    categories: tuple[tuple[int, str], ...]  # the id in the file and the name, by label
    truth: Mapping[str, Any] = field(repr=False)

    @property
    def num_classes(self) -> int:
        return len(self.categories)


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentationSet(PictureSet[Pair]):
    """Pictures with masks. `numbers` says for each of a mask's 256 values which class it is."""

    class_names: tuple[str, ...]
    numbers: Tensor = field(repr=False)  # int16 (256,): a class, VOID, or UNKNOWN for a value that may not occur

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


VOID = 255  # a pixel that does not count
UNKNOWN = -1  # a value that no mask of the set may hold
