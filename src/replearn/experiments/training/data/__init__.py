"""The data room: say a name, get a data set; ask what is there; fetch what is not.

The folder `sets` is the list of data sets, one file each.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar

from ....errors import ReplearnError
from . import sets
from .base import IGNORED, ImageSet, StreamedSet
from .downloading import download_source
from .fetching import PATIENT, Patience, Progress
from .inspection import DataStatus, FileCheck, inspect_source
from .scenes import DetectionSet, SegmentationSet
from .text import TextSet

__all__ = [
    "IGNORED",
    "DataStatus",
    "DetectionSet",
    "FileCheck",
    "ImageSet",
    "Patience",
    "SegmentationSet",
    "StreamedSet",
    "TextSet",
    "available",
    "download",
    "expect",
    "load",
    "shape_of",
    "status",
    "with_classes",
]

Loaded = ImageSet | StreamedSet | TextSet | DetectionSet | SegmentationSet
Kind = TypeVar("Kind", ImageSet, StreamedSet, TextSet, DetectionSet, SegmentationSet)
Root = str | os.PathLike[str] | None


def available() -> tuple[str, ...]:
    """The names of all data sets, whether they are on this machine or not."""
    return tuple(sorted(module.name for module in iter_modules(sets.__path__)))


def load(name: str, root: Root = None, strict_counts: bool = True, **settings: Any) -> Loaded:
    """A data set by its name.

    The root is the argument, else the environment variable REPLEARN_DATA, else ./data. Missing or
    broken files are a ReplearnError that names them, the places looked at and the cure.
    `strict_counts=False` takes any number of images: for files made by hand. What
    else a data set takes, as a text's `min_count`, is passed on.
    """
    found = _set(name)
    if unknown := sorted(settings.keys() - signature(found.load).parameters.keys()):
        raise ReplearnError(f"{name} has no {unknown[0]}, so it is no data set for this task. Use another.")
    loaded: Loaded = found.load(root, strict_counts, **settings)
    return loaded


def expect(kind: type[Kind], loaded: Loaded, task: str) -> Kind:
    """The data set, if it is of the kind that the task learns from."""
    if not isinstance(loaded, kind):
        raise ReplearnError(
            f"{loaded.name} is a {type(loaded).__name__}, and {task} learns from a {kind.__name__}. Use a recipe "
            "for this data set, or another data set."
        )
    return loaded


def with_classes(loaded: Loaded, classes: Sequence[int]) -> ImageSet:
    """Only the images of these classes, numbered anew from 0 in the order given."""
    if not isinstance(loaded, ImageSet):
        raise ReplearnError(
            f"classes={list(classes)}: {loaded.name} is not held in memory, so it can't be divided."
        )
    return loaded.with_classes(classes)


def status(name: str, root: Root = None, checksums: bool = True) -> DataStatus:
    """What is there of a data set, whether it is whole, and how to get it; broken data is no error here."""
    found = _set(name)
    return inspect_source(found.SOURCE, found.load, root, checksums)


def download(
    name: str,
    root: Root = None,
    *,
    layout: str | None = None,
    mirror: str | None = None,
    patience: Patience = PATIENT,
    progress: Progress | None = None,
) -> Path:
    """Fetch a data set from its official address, check it and unpack it below the root; its folder.

    What is there and right is not fetched again; nothing that was there is deleted. `mirror` is
    an address that holds the same files under the same names.
    """
    return download_source(
        _set(name).SOURCE, root, layout=layout, mirror=mirror, patience=patience, progress=progress
    )


def shape_of(name: str) -> tuple[int, int, int]:
    """Classes, channels and side length of a data set, whether it is on this machine or not."""
    source = _set(name).SOURCE
    channels, size, _ = source.shape or (3, 224, 224)
    return int(source.num_classes), int(channels), int(size)


def _set(name: str) -> Any:
    if name not in available():
        raise ReplearnError(f"There is no data set {name!r}; there are {', '.join(available())}.")
    return import_module(f"{sets.__name__}.{name}")
