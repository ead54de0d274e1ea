"""Data sets by name: load one, check whether it is there, download it. The folder `sets` is their list."""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar

from ....errors import ReplearnError
from . import sets
from .folders import StreamedSet as StreamedSet
from .images import IGNORED as IGNORED
from .images import ImageSet as ImageSet
from .scenes import DetectionSet as DetectionSet
from .scenes import SegmentationSet as SegmentationSet
from .sets.small_images import download_images
from .source import Root, Source, check_counts, find, places_of
from .text import TextSet as TextSet

Loaded = ImageSet | StreamedSet | TextSet | DetectionSet | SegmentationSet
Kind = TypeVar("Kind", ImageSet, StreamedSet, TextSet, DetectionSet, SegmentationSet)


def available() -> tuple[str, ...]:
    """The names of all data sets, whether they are on this machine or not."""
    return tuple(sorted(_sources()))


def load(name: str, root: Root = None, strict_counts: bool = True, **settings: Any) -> Loaded:
    """A data set by its name.

    The root is the argument, else the environment variable REPLEARN_DATA, else ./data. ReplearnError for missing
    or broken files names them, the folders searched, and how to get them. `strict_counts=False` accepts any number
    of samples, for files made by hand. Further settings, as a text's `min_count`, are passed on.
    """
    source = source_named(name)
    if unknown := sorted(settings.keys() - signature(source.load).parameters.keys()):
        raise ReplearnError(f"{name} has no {unknown[0]}, so it is no data set for this task. Use another.")
    loaded: Loaded = source.load(source, root, **settings)
    if strict_counts and not source.torchvision:  # whose files have the official md5, or are refused
        check_counts(source, root, loaded)
    return loaded


def expect(kind: type[Kind], loaded: Loaded, task: str) -> Kind:
    """The data set, if it is of the kind that the task learns from."""
    if not isinstance(loaded, kind):
        raise ReplearnError(
            f"{loaded.name} is a {type(loaded).__name__}, and {task} learns from a {kind.__name__}. Use a recipe "
            "for this data set, or another data set."
        )
    return loaded


@dataclass(frozen=True)
class DataStatus:
    """A data set on this machine. `problem` is the text of the error that loading it gives."""

    source: Source
    found: Path | None
    looked: tuple[Path, ...]
    problem: str | None
    data: Loaded | None


def status(name: str, root: Root = None) -> DataStatus:
    """Where a data set is, whether it loads, and how to get it; broken data raises no error here."""
    source = source_named(name)
    problem, found, data = None, None, None
    try:
        found = find(source, root)
        data = load(name, root)
    except ReplearnError as error:
        problem = str(error)
    return DataStatus(source, found, tuple(places_of(source, root)), problem, data)


def download(name: str, root: Root = None) -> Path:
    """Download a data set from its official address by torchvision, which checks it; returns its folder.

    Correct files are not downloaded again. An archive in the root is unpacked.
    """
    return download_images(source_named(name), root)


def shape_of(name: str) -> tuple[int, int, int]:
    """Classes, channels and side length of a data set, whether it is on this machine or not."""
    source = source_named(name)
    return source.num_classes, *source.shape[:2]


@cache
def _sources() -> dict[str, Source]:
    modules = [import_module(f"{sets.__name__}.{module.name}") for module in iter_modules(sets.__path__)]
    held = [value for module in modules for value in vars(module).values() if isinstance(value, Source)]
    return {source.name: source for source in held}


def source_named(name: str) -> Source:
    if name not in available():
        raise ReplearnError(f"There is no data set {name!r}; there are {', '.join(available())}.")
    return _sources()[name]
