"""What is there of a data set, as data; printing it is the command line's job."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ....errors import ReplearnError
from .base import ImageSet, StreamedSet
from .places import find, places_of
from .scenes import DetectionSet, SegmentationSet
from .source import Layout, Source
from .text import TextSet


@dataclass(frozen=True, kw_only=True)
class FileCheck:
    """One file's md5 against the official one."""

    name: str
    expected: str | None  # None where no official sum is known
    found: str | None  # None where the file is missing or can't be read

    @property
    def verdict(self) -> Literal["ok", "differs", "missing", "no official sum"]:
        if self.found is None:
            return "missing"
        if self.expected is None:
            return "no official sum"
        return "ok" if self.found == self.expected else "differs"


@dataclass(frozen=True, kw_only=True)
class DataStatus:
    """A data set on this machine. `problem` is the text of the error that loading it gives."""

    name: str
    title: str
    found: Path | None
    layout: str | None
    looked: tuple[Path, ...]
    num_classes: int | None
    num_train: int | None
    num_test: int | None
    checksums: tuple[FileCheck, ...]
    problem: str | None
    how: str
    unit: str = "images"  # what is counted
    classes: str = "classes"  # what the classes are

    @property
    def ok(self) -> bool:
        """It loads, and no file that was checked differs from the official one."""
        return self.problem is None and all(check.verdict != "differs" for check in self.checksums)


def inspect_source(
    source: Source,
    load: Callable[
        [str | os.PathLike[str] | None], ImageSet | StreamedSet | TextSet | DetectionSet | SegmentationSet
    ],
    root: str | os.PathLike[str] | None,
    checksums: bool = True,
) -> DataStatus:
    """Load the data set once to count it, and sum up its files."""
    data, problem, found = None, None, None
    try:
        found = find(source, root)
        data = load(root)
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
        num_classes=data.num_classes if data else None,
        num_train=data.num_train if data else None,
        num_test=data.num_test if data else None,
        checksums=check_files(layout, folder) if checksums and folder and layout else (),
        problem=problem,
        how=source.how,
        unit=data.unit if data else "images",
        classes=data.classes if data else "classes",
    )


def check_files(layout: Layout, folder: Path) -> tuple[FileCheck, ...]:
    """The verdict on each file of the layout; a file that may be missing is left out if it is."""
    return tuple(
        FileCheck(name=file.name, expected=file.md5, found=md5_of(folder / file.name))
        for file in layout.files
        if file.required or (folder / file.name).is_file()
    )


def md5_of(path: Path) -> str | None:
    """The md5 of a file, None if it is not there or can't be read."""
    try:
        with open(path, "rb") as file:
            # md5 is what the official pages give; it guards against damage, not against an enemy
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError:
        return None
