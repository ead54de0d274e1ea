"""Pictures and masks as tensors; what can't be used is a ReplearnError that names the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ....errors import ReplearnError
from .scenes import UNKNOWN, Defects, Pair, Scene, SegmentationSet
from .source import Source

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def open_picture(path: Path) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ReplearnError("Reading pictures needs Pillow: pip install 'replearn[vision]'.") from error
    try:
        image = Image.open(path)
        image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ReplearnError(f"{path} is no picture that can be read ({error}).") from error
    return image


def pixels(image: Any) -> Tensor:
    """uint8 (height, width, channels) or (height, width); a copy that can be written to."""
    channels = len(image.getbands())
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    shape = (image.height, image.width, channels) if channels > 1 else (image.height, image.width)
    return flat.reshape(shape)


def read_picture(path: Path) -> Tensor:
    """uint8 (3, height, width)."""
    return pixels(open_picture(path).convert("RGB")).permute(2, 0, 1).contiguous()


def read_scene(scene: Scene) -> tuple[Tensor]:
    """The picture of a scene, which must be as large as its annotation says."""
    image = read_picture(scene.path)
    if image.shape[1:] != (scene.height, scene.width):
        raise ReplearnError(
            f"{scene.path} is {image.shape[2]}x{image.shape[1]} pixels, and its annotation says "
            f"{scene.width}x{scene.height}: the boxes are of another picture."
        )
    return (image,)


def read_pair(pair: Pair, data: SegmentationSet) -> tuple[Tensor, Tensor]:
    """A picture and its classes as uint8 (height, width), VOID where a pixel does not count."""
    image, mask = read_picture(pair.image), grey(pair.mask)
    if image.shape[1:] != mask.shape:
        raise ReplearnError(
            f"The mask {pair.mask} is {mask.shape[1]}x{mask.shape[0]} pixels, and its picture {pair.image} is "
            f"{image.shape[2]}x{image.shape[1]}."
        )
    numbers = data.numbers[mask.long()]
    if bool((numbers == UNKNOWN).any()):
        value = int(mask[numbers == UNKNOWN][0])
        raise ReplearnError(
            f"The mask {pair.mask} holds the class id {value}, which {data.name} has not: it has "
            f"{data.num_classes} classes."
        )
    return image, numbers.to(torch.uint8)


def grey(path: Path) -> Tensor:
    """A mask's values: a grey picture, one with a palette, or three equal channels."""
    mask = open_picture(path)
    if mask.mode not in ("L", "P", "LA", "PA", "RGB", "RGBA"):
        raise ReplearnError(
            f"The mask {path} has pixels of {mask.mode!r}; it has to hold 8 bits, a class id each."
        )
    values = pixels(mask)
    if values.dim() == 3:
        if mask.mode in ("RGB", "RGBA") and bool((values[..., :3] != values[..., :1]).any()):
            raise ReplearnError(f"The mask {path} is a colour picture; it has to hold a class id at every pixel.")
        values = values[..., 0]
    return values.contiguous()


def list_pairs(images: Path, masks: Path, of: dict[str, Path] | None = None) -> tuple[Pair, ...]:
    """Each picture of a folder with the mask of the same name, whatever their suffixes; sorted.

    ReplearnError for a picture without a mask or a folder without pictures.
    """
    by_stem = of if of is not None else {path.stem: path for path in pictures_in(masks)}
    found = []
    for path in pictures_in(images):
        if path.stem not in by_stem:
            raise ReplearnError(f"{path} has no mask: there is no {path.stem}.* in {masks}.")
        found.append(Pair(path, by_stem[path.stem]))
    if not found:
        raise ReplearnError(f"{images} holds no picture ({', '.join(SUFFIXES)}).")
    return tuple(found)


def pictures_in(folder: Path) -> Sequence[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise ReplearnError(f"Can't read the folder {folder}: {error}.") from error


def check_counts(
    found: SegmentationSet, source: Source, folder: Path, strict: bool, defects: Defects | None
) -> SegmentationSet:
    """The set, if it has as many pictures as it should; under `skip` any number is taken."""
    if strict and (defects is None or defects.policy == "refuse"):
        for which, count, right in (
            ("training", found.num_train, source.num_train),
            ("test", found.num_test, source.num_test),
        ):
            if count != right:
                raise ReplearnError(
                    f"{folder} holds {count:,} {which} pictures, and {source.title} has {right:,}. {source.how}"
                )
    return found
