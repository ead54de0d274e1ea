"""Data sets of whole pictures for detection and segmentation: files with boxes or masks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ....errors import ReplearnError, library
from .source import Counted

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
VOID = 255  # a pixel that does not count
UNKNOWN = -1  # a value that no mask of the set may hold


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
class PictureSet(Counted, Generic[Item]):
    """Pictures for training and for the test, by their files."""

    name: str
    train: tuple[Item, ...] = field(repr=False)
    test: tuple[Item, ...] = field(repr=False)
    class_names: tuple[str, ...]

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


@dataclass(frozen=True, eq=False, kw_only=True)
class DetectionSet(PictureSet[Scene]):
    """Pictures with boxes. `truth` is the test part as COCO's own annotation data, crowds included."""

    category_ids: tuple[int, ...]  # the file's id of each class
    truth: Mapping[str, Any] = field(repr=False)

    def read(self, scene: Scene) -> tuple[Tensor]:
        """The picture of a scene, which must be as large as its annotation says."""
        image = read_picture(scene.path)
        if image.shape[1:] != (scene.height, scene.width):
            raise ReplearnError(
                f"{scene.path} is {image.shape[2]}x{image.shape[1]} pixels, and its annotation says "
                f"{scene.width}x{scene.height}: the boxes are of another picture."
            )
        return (image,)


@dataclass(frozen=True, eq=False, kw_only=True)
class SegmentationSet(PictureSet[Pair]):
    """Pictures with masks. `numbers` maps each of a mask's 256 values to a class."""

    numbers: Tensor = field(repr=False)  # int16 (256,): a class, VOID, or UNKNOWN for a value that may not occur

    def read(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """A picture and its classes as uint8 (height, width), VOID where a pixel does not count."""
        image, mask = read_picture(pair.image), read_mask(pair.mask)
        if image.shape[1:] != mask.shape:
            raise ReplearnError(
                f"The mask {pair.mask} is {mask.shape[1]}x{mask.shape[0]} pixels, and its picture {pair.image} is "
                f"{image.shape[2]}x{image.shape[1]}."
            )
        numbers = self.numbers[mask.long()]
        if bool((numbers == UNKNOWN).any()):
            value = int(mask[numbers == UNKNOWN][0])
            raise ReplearnError(
                f"The mask {pair.mask} holds the class id {value}, which {self.name} has not: it has "
                f"{self.num_classes} classes."
            )
        return image, numbers.to(torch.uint8)


def open_picture(path: Path) -> Any:
    """A decoded PIL picture; ReplearnError that names the file where it is none."""
    Image = library("PIL.Image", "vision")
    try:
        image = Image.open(path)
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ReplearnError(f"{path} is no picture that can be read ({error}).") from error
    return image


def pixels(image: Any) -> Tensor:
    """uint8 (channels, height, width)."""
    return library("torchvision.transforms.functional", "vision").pil_to_tensor(image).contiguous()


def read_picture(path: Path) -> Tensor:
    """uint8 (3, height, width)."""
    return pixels(open_picture(path).convert("RGB"))


def read_mask(path: Path) -> Tensor:
    """A mask's values: a grey picture, one with a palette, or three equal channels."""
    mask = open_picture(path)
    if mask.mode not in ("L", "P", "LA", "PA", "RGB", "RGBA"):
        raise ReplearnError(
            f"The mask {path} has pixels of {mask.mode!r}; it has to hold 8 bits, a class id each."
        )
    values = pixels(mask)
    if mask.mode in ("RGB", "RGBA") and bool((values[:3] != values[:1]).any()):
        raise ReplearnError(f"The mask {path} is a colour picture; it has to hold a class id at every pixel.")
    return values[0]
