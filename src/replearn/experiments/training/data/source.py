"""Where a data set comes from and how it lies on disk, as data: the readers and the downloader obey it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

Reader = Callable[[Path], tuple[Tensor, Tensor]]  # a file -> uint8 images (N, C, H, W), int64 labels (N,)


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
