"""The data room: say a name, get a data set; ask what is there; fetch what is not.

The folder `sets` is the list of data sets, one file each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, TypeVar

from ....errors import ReplearnError
from . import sets
from .fetching import download_source
from .folders import StreamedSet
from .images import IGNORED, ImageSet
from .scenes import DetectionSet, SegmentationSet
from .source import FileCheck, Root, Source, check_files, find, places_of
from .text import TextSet

__all__ = [
    "IGNORED",
    "DataStatus",
    "DetectionSet",
    "ImageSet",
    "SegmentationSet",
    "StreamedSet",
    "TextSet",
    "available",
    "download",
    "expect",
    "load",
    "shape_of",
    "status",
]

Loaded = ImageSet | StreamedSet | TextSet | DetectionSet | SegmentationSet
Kind = TypeVar("Kind", ImageSet, StreamedSet, TextSet, DetectionSet, SegmentationSet)


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


@dataclass(frozen=True, kw_only=True)
class DataStatus:
    """A data set on this machine. `problem` is the text of the error that loading it gives."""

    name: str
    title: str
    found: Path | None
    layout: str | None
    looked: tuple[Path, ...]
    checksums: tuple[FileCheck, ...]
    problem: str | None
    how: str
    num_classes: int | None = None
    num_train: int | None = None
    num_test: int | None = None
    unit: str = "images"  # what is counted
    classes: str = "classes"  # what the classes are

    @property
    def ok(self) -> bool:
        """It loads, and no file that was checked differs from the official one."""
        return self.problem is None and all(check.verdict != "differs" for check in self.checksums)


def status(name: str, root: Root = None, checksums: bool = True) -> DataStatus:
    """What is there of a data set, whether it is whole, and how to get it; broken data is no error here."""
    found = _set(name)
    return inspect_source(found.SOURCE, found.load, root, checksums)


def inspect_source(
    source: Source, load: Callable[[Root], Loaded], root: Root, checksums: bool = True
) -> DataStatus:
    """Load the data set once to count it, and sum up its files."""
    problem, found, counts = None, None, {}
    try:
        found = find(source, root)
        data = load(root)
        names = ("num_classes", "num_train", "num_test", "unit", "classes")
        counts = {name: getattr(data, name) for name in names}
    except ReplearnError as error:
        problem = str(error)
    folder, layout = found or (None, None)
    if source.bundled_with and (spec := find_spec(source.bundled_with)) is not None and spec.origin:
        folder = Path(spec.origin).parent
    return DataStatus(
        name=source.name,
        title=source.title,
        found=folder,
        layout=layout.name if layout else None,
        looked=tuple(dict.fromkeys(place for place, _ in places_of(source, root))),
        checksums=check_files(layout, folder) if checksums and folder and layout else (),
        problem=problem,
        how=source.how,
        **counts,
    )


def download(name: str, root: Root = None, mirror: str | None = None) -> Path:
    """Fetch a data set from its official address, check it and unpack it below the root; its folder.

    What is there and right is not fetched again; nothing that was there is deleted. `mirror` is
    an address that holds the same files under the same names.
    """
    return download_source(_set(name).SOURCE, root, mirror)


def shape_of(name: str) -> tuple[int, int, int]:
    """Classes, channels and side length of a data set, whether it is on this machine or not."""
    source = _set(name).SOURCE
    channels, size, _ = source.shape or (3, 224, 224)
    return int(source.num_classes), int(channels), int(size)


def _set(name: str) -> Any:
    if name not in available():
        raise ReplearnError(f"There is no data set {name!r}; there are {', '.join(available())}.")
    return import_module(f"{sets.__name__}.{name}")
