"""From files to an ImageSet: read each one, check it, put them together."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from ....errors import ReplearnError
from .base import ImageSet
from .places import cure, locate
from .source import OfficialFile, Reader, Source


def load_images(
    source: Source, root: str | os.PathLike[str] | None = None, strict_counts: bool = True
) -> ImageSet:
    """Read a data set from its official files.

    ReplearnError names the file that is missing, cut off, of a wrong size or with labels out of
    range, and the cure. `strict_counts=False` takes any number of images: for files made by hand.
    """
    folder, layout = locate(source, root)
    assert layout.read is not None  # only streamed layouts have no reader
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {"train": [], "test": []}
    for file in layout.files:
        if file.split is not None:
            part = read_checked(source, file, folder / file.name, layout.read, strict_counts)
            parts[file.split].append(part)
    train_images, test_images = (torch.cat([images for images, _ in parts[split]]) for split in parts)
    train_labels, test_labels = (torch.cat([labels for _, labels in parts[split]]) for split in parts)
    mean, std = channel_statistics(train_images)
    return ImageSet(
        name=source.name,
        num_classes=source.num_classes,
        train_images=train_images,
        train_labels=train_labels,
        test_images=test_images,
        test_labels=test_labels,
        mean=mean,
        std=std,
    )


def read_checked(
    source: Source, file: OfficialFile, path: Path, read: Reader, strict_counts: bool
) -> tuple[Tensor, Tensor]:
    """One file's images and labels, after every check that needs no checksum."""
    try:
        images, labels = read(path)
    except ReplearnError as error:
        raise ReplearnError(f"{error} {cure(source)}") from error
    except OSError as error:
        raise ReplearnError(f"Can't read {path}: {error}. {cure(source)}") from error
    problem = None
    if tuple(images.shape[1:]) != source.shape or images.dtype != torch.uint8:
        shape = "x".join(str(side) for side in images.shape[1:])
        problem = f"holds {images.dtype} images of shape {shape}, not uint8 of {'x'.join(map(str, source.shape))}"
    elif len(images) != len(labels):
        problem = f"holds {len(images):,} images and {len(labels):,} labels"
    elif not len(images) or (strict_counts and len(images) != file.num_images):
        problem = f"holds {len(images):,} images, and {file.num_images:,} are expected: it is cut off or altered"
    else:
        outside = ((labels < 0) | (labels >= source.num_classes)).nonzero().flatten().tolist()
        if outside:
            problem = (
                f"gives image {outside[0]:,} the label {int(labels[outside[0]])}, and the labels of "
                f"{source.title} go from 0 to {source.num_classes - 1}"
            )
    if problem:
        raise ReplearnError(f"{path} {problem}. {cure(source)}")
    return images, labels


def records_of(path: Path, length: int) -> Tensor:
    """A binary file as rows of `length` bytes; ReplearnError if it ends within one."""
    raw = bytearray(path.read_bytes())
    if not raw or len(raw) % length:
        raise ReplearnError(
            f"{path} has {len(raw):,} bytes, which is no whole number of records of {length:,}: it is cut off, "
            "or not what its name says."
        )
    return torch.frombuffer(raw, dtype=torch.uint8).reshape(-1, length)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel of uint8 images, scaled to 0..1.

    From a histogram, which is exact: the same on every machine, however many threads count.
    """
    levels = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = float(share @ levels)
        deviation = float(share @ (levels - mean).square()) ** 0.5
        means.append(mean)
        deviations.append(deviation or 1.0)  # a constant channel is only shifted
    return tuple(means), tuple(deviations)
