"""ImageNet (ILSVRC 2012): 1,281,167 + 50,000 pictures in 1,000 classes, streamed.

Class folders: train/n01440764/*.JPEG and val/n01440764/*.JPEG; classes are numbered in the order of
their names.
"""

from __future__ import annotations

import os
from pathlib import Path

from .....errors import ReplearnError
from ..base import StreamedSet
from ..folders import FolderStream, class_folders, list_pictures
from ..places import locate
from ..source import Layout, Source

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

SOURCE = Source(
    name="imagenet",
    title="ImageNet",
    num_classes=1000,
    shape=(3, 224, 224),
    num_train=1_281_167,
    num_test=50_000,
    layouts=(
        Layout(
            name="class folders",
            folders=("imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", ""),
            signs=("train/*/",),
        ),
    ),
    how=(
        "It is given out by image-net.org after registration (ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar); "
        "unpack it as imagenet/train/CLASS/*.JPEG and imagenet/val/CLASS/*.JPEG below the root."
    ),
)


def load(root: str | os.PathLike[str] | None = None, strict_counts: bool = True) -> StreamedSet:
    folder, _ = locate(SOURCE, root)
    try:
        stream = folder_stream(folder)
    except OSError as error:
        raise ReplearnError(f"Can't read ImageNet in {folder}: {error}. {SOURCE.how}") from error
    if strict_counts:
        for what, found, expected in (
            ("classes", stream.num_classes, SOURCE.num_classes),
            ("training pictures", stream.num_train, SOURCE.num_train),
            ("validation pictures", stream.num_test, SOURCE.num_test),
        ):
            if found != expected:
                raise ReplearnError(
                    f"{folder} holds {found:,} {what}, and ImageNet has {expected:,}: it is not whole, or has "
                    f"more. Unpack it again, or write strict_counts=False to take it as it is. {SOURCE.how}"
                )
    return stream


def folder_stream(folder: Path) -> FolderStream:
    for split in ("train", "val"):
        if not (folder / split).is_dir() or not class_folders(folder / split):
            raise ReplearnError(
                f"{folder / split} has no class folders. Validation pictures that lie side by side must be sorted "
                f"into folders named as those of train/ first. {SOURCE.how}"
            )
    classes, val_classes = class_folders(folder / "train"), class_folders(folder / "val")
    if differing := sorted(set(classes) ^ set(val_classes)):
        where = "train" if differing[0] in classes else "val"
        raise ReplearnError(
            f"The class {differing[0]} is only in {folder / where}; train/ and val/ must have the same "
            "class folders."
        )
    train, test = list_pictures(folder / "train", classes), list_pictures(folder / "val", classes)
    return FolderStream(
        name=SOURCE.name,
        num_classes=len(classes),
        num_train=len(train),
        num_test=len(test),
        mean=MEAN,
        std=STD,
        train=train,
        test=test,
    )
