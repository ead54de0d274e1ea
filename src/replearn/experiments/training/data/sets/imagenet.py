"""ImageNet (ILSVRC 2012): 1,281,167 + 50,000 pictures in 1,000 classes, streamed.

Class folders: train/n01440764/*.JPEG and val/n01440764/*.JPEG; classes are numbered in the order of
their names.
"""

from .....errors import ReplearnError, library
from ..folders import StreamedSet
from ..scenes import IMAGENET_MEAN, IMAGENET_STD
from ..source import Root, Source, locate


def load_imagenet(source: Source, root: Root = None) -> StreamedSet:
    folder = locate(source, root)
    try:
        read = library("torchvision.datasets", "vision").ImageFolder
        train, test = (read(str(folder / part)) for part in ("train", "val"))
    except OSError as error:
        raise ReplearnError(
            f"Can't read ImageNet in {folder}: {error}. Validation pictures that lie side by side must be sorted "
            f"into folders named as those of train/ first. {source.how}"
        ) from error
    if differing := sorted(set(train.classes) ^ set(test.classes)):
        where = "train" if differing[0] in train.classes else "val"
        raise ReplearnError(
            f"The class {differing[0]} is only in {folder / where}; train/ and val/ must have the same "
            "class folders."
        )
    return StreamedSet(
        name=source.name,
        num_classes=len(train.classes),
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        train=train,
        test=test,
    )


IMAGENET = Source(
    name="imagenet",
    load=load_imagenet,
    title="ImageNet",
    num_classes=1000,
    shape=(3, 224, 224),
    num_train=1_281_167,
    num_test=50_000,
    folders=("imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC", ""),
    patterns=("train/*/",),
    how=(
        "It is given out by image-net.org after registration (ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar); "
        "unpack it as imagenet/train/CLASS/*.JPEG and imagenet/val/CLASS/*.JPEG below the root."
    ),
)
