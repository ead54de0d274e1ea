"""Image sets that fit in memory: read from their official files, each one checked, as tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from ....errors import ReplearnError
from .source import OfficialFile, Reader, Source, cure, locate

IGNORED = -100  # the label of a filler image; cross_entropy leaves it out by default


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A whole data set in memory: uint8 images (N, C, H, W) and int64 labels, training and test."""

    name: str
    num_classes: int
    train_images: Tensor = field(repr=False)
    train_labels: Tensor = field(repr=False)
    test_images: Tensor = field(repr=False)
    test_labels: Tensor = field(repr=False)
    mean: tuple[float, ...]  # per channel, of the training images scaled to 0..1
    std: tuple[float, ...]

    unit = "images"  # what is counted, and what the classes are
    classes = "classes"

    @property
    def channels(self) -> int:
        return int(self.train_images.shape[1])

    @property
    def size(self) -> int:
        return int(self.train_images.shape[2])

    @property
    def num_train(self) -> int:
        return len(self.train_labels)

    @property
    def num_test(self) -> int:
        return len(self.test_labels)

    def with_classes(self, classes: Sequence[int]) -> ImageSet:
        """Only the images of these classes, numbered anew from 0 in the order given; mean and std stay."""
        known = range(self.num_classes)
        if len(set(classes)) != len(classes) or len(classes) < 2 or not all(label in known for label in classes):
            raise ReplearnError(
                f"classes={list(classes)}: write at least two different classes of {self.name}, each from 0 to "
                f"{self.num_classes - 1}."
            )
        numbers = torch.full((self.num_classes,), -1)
        numbers[list(classes)] = torch.arange(len(classes))
        train, test = numbers[self.train_labels], numbers[self.test_labels]
        return replace(
            self,
            num_classes=len(classes),
            train_images=self.train_images[train >= 0],
            train_labels=train[train >= 0],
            test_images=self.test_images[test >= 0],
            test_labels=test[test >= 0],
        )


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
    train, test = (joined(part) for part in parts.values())
    return ImageSet(source.name, source.num_classes, *train, *test, *channel_statistics(train[0]))


def joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def read_checked(
    source: Source, file: OfficialFile, path: Path, read: Reader, strict_counts: bool
) -> tuple[Tensor, Tensor]:
    """One file's images and labels, after every check that needs no checksum."""
    try:
        images, labels = read(path)
    except (ReplearnError, OSError) as error:
        told = f"Can't read {path}: {error}." if isinstance(error, OSError) else str(error)
        raise ReplearnError(f"{told} {cure(source)}") from error
    problem = None
    if tuple(images.shape[1:]) != source.shape or images.dtype != torch.uint8:
        shape = "x".join(str(side) for side in images.shape[1:])
        problem = f"holds {images.dtype} images of shape {shape}, not uint8 of {'x'.join(map(str, source.shape))}"
    elif len(images) != len(labels):
        problem = f"holds {len(images):,} images and {len(labels):,} labels"
    elif not len(images) or (strict_counts and len(images) != file.num_images):
        problem = f"holds {len(images):,} images, and {file.num_images:,} are expected: it is cut off or altered"
    elif outside := ((labels < 0) | (labels >= source.num_classes)).nonzero().flatten().tolist():
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


def counted_from_one(labels: Tensor, path: Path, source: str) -> Tensor:
    """Labels that a file counts from 1 to 10."""
    if wrong := labels[(labels < 1) | (labels > 10)].tolist():
        raise ReplearnError(f"{path} holds the label {wrong[0]}, and the labels of {source} go from 1 to 10.")
    return labels


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


def stratified_order(labels: Tensor, seed: int) -> Tensor:
    """Indices of all images, shuffled, such that classes take turns: any beginning of it is balanced.

    Shuffled by a hash and not by a generator, whose stream a library may change from one version
    to the next; committed results must stay comparable.
    """
    digests = [hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest() for index in range(len(labels))]
    shuffled = sorted(range(len(labels)), key=digests.__getitem__)
    seen: dict[int, int] = {}
    turns = []
    for index, label in zip(shuffled, labels[shuffled].tolist(), strict=True):
        turns.append((seen.get(label, 0), digests[index], index))
        seen[label] = seen.get(label, 0) + 1
    return torch.tensor([index for _, _, index in sorted(turns)], dtype=torch.int64)
