"""What a data set contains and where it is searched for.

The root is the one that was given, else REPLEARN_DATA, else ./data.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import ReplearnError

VARIABLE = "REPLEARN_DATA"
Root = str | os.PathLike[str] | None


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set: its size and shape, where it is below the root, and how to get it."""

    name: str
    title: str
    load: Callable[..., Any]  # takes the source, the root and further settings
    num_train: int
    num_test: int
    how: str  # how to get it, as a sentence
    folders: tuple[str, ...] = ()  # tried in order; '' is the root itself
    patterns: tuple[str, ...] = ()  # a folder with a match of any is the data set
    num_classes: int = 0  # 0 if it follows from the data, as for a text
    shape: tuple[int, int, int] = (0, 0, 0)  # channels, height, width of images
    torchvision: str | None = None  # the class of torchvision.datasets that reads it
    splits: tuple[object, object] = ("train", "test")  # what that class calls its two parts


class Counted:
    """A data set with parts `train` and `test` that have a length, in `unit`."""

    train: Any
    test: Any
    unit = "images"
    classes = "classes"  # what the classes are

    @property
    def num_train(self) -> int:
        return len(self.train)

    @property
    def num_test(self) -> int:
        return len(self.test)


def root_of(root: Root) -> tuple[Path, str]:
    """The folder of all data, and where that setting is from, in words."""
    if root is not None:
        return Path(root).expanduser(), "the root that was given"
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser(), f"from the environment variable {VARIABLE}"
    return Path("data"), f"the default, since neither a root nor {VARIABLE} was given"


def places_of(source: Source, root: Root) -> list[Path]:
    """Every folder where the data set may be."""
    base = root_of(root)[0].absolute()
    places = [base / folder for folder in source.folders]
    if base.name in source.folders:  # the root is the data set's own folder
        places.append(base)
    return list(dict.fromkeys(places))


def find(source: Source, root: Root) -> Path | None:
    """The first folder that matches one of the data set's patterns, else None."""
    try:
        for folder in places_of(source, root):
            if any(next(folder.glob(pattern), None) is not None for pattern in source.patterns):
                return folder
    except OSError as error:
        raise ReplearnError(f"Can't look for {source.title}: {error}.") from error
    return None


def locate(source: Source, root: Root) -> Path:
    """As `find`; ReplearnError with the folders searched and how to get the data if there is none."""
    found = find(source, root)
    if found is None:
        base, why = root_of(root)
        looked = ", ".join(str(folder) for folder in places_of(source, root))
        raise ReplearnError(
            f"{source.title} was not found. Looked in {looked}; the root {base} is {why}. {cure(source)}"
        )
    return found


def cure(source: Source) -> str:
    """How to get data that is missing or broken."""
    if source.torchvision:
        return f"Get it with `replearn data download {source.name}`, or by hand: {source.how}"
    return source.how


def check_counts(source: Source, root: Root, loaded: Any) -> None:
    """Raise if the number of samples or classes is not the official one."""
    names = {"classes": "num_classes", f"training {loaded.unit}": "num_train", f"test {loaded.unit}": "num_test"}
    for what, name in names.items():
        found, right = getattr(loaded, name), getattr(source, name)
        if right and found != right:
            raise ReplearnError(
                f"{find(source, root)} holds {found:,} {what}, and {source.title} has {right:,}: it is not whole, "
                f"or has more. Write strict_counts=False to take it as it is. {source.how}"
            )
