"""ImageNet (ILSVRC 2012): 1,281,167 + 50,000 pictures in 1,000 classes, streamed.

Class folders: train/n01440764/*.JPEG and val/n01440764/*.JPEG; classes are numbered in the order of
their names.
"""

from pathlib import Path

from .....errors import ReplearnError
from ..folders import StreamedSet, class_folders, list_pictures
from ..scenes import IMAGENET_MEAN, IMAGENET_STD
from ..source import Root, Source, check_counts, locate

SOURCE = Source(
    name="imagenet",
    title="ImageNet",
    num_classes=1000,
    shape=(3, 224, 224),
    num_train=1_281_167,
    num_test=50_000,
    folders=("imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", ""),
    signs=("train/*/",),
    how=(
        "It is given out by image-net.org after registration (ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar); "
        "unpack it as imagenet/train/CLASS/*.JPEG and imagenet/val/CLASS/*.JPEG below the root."
    ),
)


def load(root: Root = None, strict_counts: bool = True) -> StreamedSet:
    folder = locate(SOURCE, root)
    try:
        stream = folder_stream(folder)
    except OSError as error:
        raise ReplearnError(f"Can't read ImageNet in {folder}: {error}. {SOURCE.how}") from error
    if strict_counts:
        check_counts(SOURCE, folder, stream)
    return stream


def folder_stream(folder: Path) -> StreamedSet:
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
    return StreamedSet(
        name=SOURCE.name,
        num_classes=len(classes),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        train=list_pictures(folder / "train", classes),
        test=list_pictures(folder / "val", classes),
    )
