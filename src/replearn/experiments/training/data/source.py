"""Where a data set comes from and how it lies on disk, as data; and where it is looked for.

The root is the one that was given, else REPLEARN_DATA, else ./data.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from ....errors import ReplearnError

VARIABLE = "REPLEARN_DATA"
Reader = Callable[[Path], tuple[Tensor, Tensor]]  # a file -> uint8 images (N, C, H, W), int64 labels (N,)
Root = str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class OfficialFile:
    """One file of a layout. `split` is None where it holds no images of its own."""

    name: str
    md5: str | None = None
    split: Literal["train", "test"] | None = None
    num_images: int = 0  # or tokens
    required: bool = True


@dataclass(frozen=True, kw_only=True)
class Download:
    """An official address: an archive that holds the layout's folder, or one of its files itself."""

    url: str
    md5: str
    archive: bool = True

    @property
    def filename(self) -> str:
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way a data set lies on disk. `folders` are tried in order below the root; '' is the root itself."""

    name: str
    folders: tuple[str, ...]
    signs: tuple[str, ...]  # patterns; a folder that holds a match of any is taken to be this layout
    files: tuple[OfficialFile, ...] = ()
    downloads: tuple[Download, ...] = ()
    read: Reader | None = None

    def found_in(self, folder: Path) -> bool:
        return any(next(folder.glob(sign), None) is not None for sign in self.signs)

    def missing_in(self, folder: Path) -> list[str]:
        return [file.name for file in self.files if file.required and not (folder / file.name).is_file()]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set: what it must hold, its layouts in order of preference, and how to get it."""

    name: str
    title: str
    num_train: int
    num_test: int
    layouts: tuple[Layout, ...]
    how: str  # how to get it, a sentence
    num_classes: int = 0  # 0 where the data itself says, as a text says its words
    shape: tuple[int, int, int] = (0, 0, 0)  # channels, height, width of images
    bundled_with: str | None = None  # the library that brings it, where nothing lies on disk


def root_of(root: Root) -> tuple[Path, str]:
    """The folder of all data, and in words why it is this one."""
    if root is not None:
        return Path(root).expanduser(), "the root that was given"
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser(), f"from the environment variable {VARIABLE}"
    return Path("data"), f"the default, since neither a root nor {VARIABLE} was given"


def places_of(source: Source, root: Root) -> list[tuple[Path, Layout]]:
    """Every folder where the data set may be, with the layout it would have there."""
    base = root_of(root)[0].absolute()
    places = []
    for layout in source.layouts:
        places += [(base / folder, layout) for folder in layout.folders]
        if base.name in layout.folders:  # the root is the data set's own folder
            places.append((base, layout))
    return places


def find(source: Source, root: Root) -> tuple[Path, Layout] | None:
    """The first whole copy, else the first that has something missing, else None."""
    try:
        found = [(folder, layout) for folder, layout in places_of(source, root) if layout.found_in(folder)]
        whole = [(folder, layout) for folder, layout in found if not layout.missing_in(folder)]
    except OSError as error:
        raise ReplearnError(f"Can't look for {source.title}: {error}.") from error
    return next(iter(whole or found), None)


def locate(source: Source, root: Root) -> tuple[Path, Layout]:
    """As `find`; ReplearnError that says where was looked and how to get what is missing."""
    found = find(source, root)
    if found is None:
        base, why = root_of(root)
        looked = ", ".join(dict.fromkeys(str(folder) for folder, _ in places_of(source, root)))
        raise ReplearnError(
            f"{source.title} was not found. Looked in {looked}; the root {base} is {why}. {cure(source)}"
        )
    folder, layout = found
    if missing := layout.missing_in(folder):
        raise ReplearnError(
            f"{folder / missing[0]} is missing, so {source.title} in {folder} ({layout.name} layout) is not whole"
            + (f" ({len(missing)} files are missing)" if len(missing) > 1 else "")
            + f". {cure(source)}"
        )
    return folder, layout


def cure(source: Source) -> str:
    """What to do about data that is missing or broken."""
    if any(layout.downloads for layout in source.layouts):
        return f"Get it with `replearn data download {source.name}`, or by hand: {source.how}"
    return source.how


def check_count(source: Source, folder: Path, what: str, found: int, right: int) -> None:
    """Refuse a set that has not as many pictures or classes as it should."""
    if found != right:
        raise ReplearnError(
            f"{folder} holds {found:,} {what}, and {source.title} has {right:,}: it is not whole, or has more. "
            f"Write strict_counts=False to take it as it is. {source.how}"
        )


def md5_of(path: Path) -> str | None:
    """The md5 of a file, None if it is not there or can't be read."""
    try:
        with open(path, "rb") as file:
            # md5 is what the official pages give; it guards against damage, not against an enemy
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError:
        return None


@dataclass(frozen=True)
class FileCheck:
    """One file's md5 against the official one."""

    name: str
    verdict: Literal["ok", "differs", "missing", "no official sum"]


def check_files(layout: Layout, folder: Path) -> tuple[FileCheck, ...]:
    """The verdict on each file of the layout; a file that may be missing is left out if it is."""
    checks = []
    for file in layout.files:
        found = md5_of(folder / file.name)
        if found is None:
            checks += [FileCheck(file.name, "missing")] if file.required else []
        elif file.md5 is None:
            checks.append(FileCheck(file.name, "no official sum"))
        else:
            checks.append(FileCheck(file.name, "ok" if found == file.md5 else "differs"))
    return tuple(checks)
