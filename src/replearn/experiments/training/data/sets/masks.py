"""Street scenes with a class at every pixel.

Cityscapes (Cordts et al. 2016): cityscapes/leftImg8bit/{train,val}/CITY/CITY_*_leftImg8bit.png and
cityscapes/gtFine/{train,val}/CITY/CITY_*_gtFine_labelIds.png. The official scripts number 34 labels and train on
19 of them; the others are void. The test part here is val: the official test part has no masks.

CamVid (Brostow et al. 2009): camvid/{train,test}/NAME.* and camvid/{train,test}annot/NAME.*, masks with classes
0 to 10 and 11 for void; the split of SegNet.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from .....errors import ReplearnError
from ..scenes import UNKNOWN, VOID, Pair, SegmentationSet
from ..source import Root, Source, locate

PICTURE = "_leftImg8bit"  # how the names of Cityscapes' pictures end
CAMVID_CLASSES = (
    *("sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian"),
    "bicyclist",
)


def load_masks(source: Source, root: Root = None) -> SegmentationSet:
    folder = locate(source, root)
    if source.name == "cityscapes":
        names, numbers = official_classes()
        places = [(folder / "leftImg8bit" / part, folder / "gtFine" / part) for part in ("train", "val")]
        every, name = f"*/*{PICTURE}.png", "{city}/{stem}_gtFine_labelIds.png"
    else:
        names, numbers = CAMVID_CLASSES, numbered(range(len(CAMVID_CLASSES)), last=len(CAMVID_CLASSES))
        places = [(folder / part, folder / f"{part}annot") for part in ("train", "test")]
        every, name = "[!.]*.*", "{stem}.*"
    train, test = (pairs(source, pictures, every, masks, name) for pictures, masks in places)
    return SegmentationSet(name=source.name, class_names=names, numbers=numbers, train=train, test=test)


def official_classes() -> tuple[tuple[str, ...], Tensor]:
    """Cityscapes' 19 classes, and a mask's label id to the class that is trained, or VOID."""
    from torchvision.datasets import Cityscapes

    labels = {label.id: label.name for label in Cityscapes.classes if not label.ignore_in_eval}
    return tuple(labels.values()), numbered(labels, last=33)


def numbered(values: Iterable[int], last: int) -> Tensor:
    """The mask's values of the classes in turn, to their numbers; others up to the last one, and 255, are void."""
    numbers = torch.full((256,), UNKNOWN, dtype=torch.int16)
    numbers[: last + 1] = numbers[VOID] = VOID
    for number, value in enumerate(values):
        numbers[value] = number
    return numbers


def pairs(source: Source, pictures: Path, every: str, masks: Path, name: str) -> tuple[Pair, ...]:
    """Each picture of a folder, by a pattern, with its mask, by a pattern with its own name; sorted."""
    found = []
    for path in sorted(pictures.glob(every)):
        wanted = name.format(city=path.parent.name, stem=path.stem.removesuffix(PICTURE))
        mask = next(masks.glob(wanted), None)
        if mask is None:
            raise ReplearnError(f"{path} has no mask: there is no {masks / wanted}. {source.how}")
        found.append(Pair(path, mask))
    if not found:
        raise ReplearnError(f"{pictures} holds no {every}. {source.how}")
    return tuple(found)


CITYSCAPES = Source(
    name="cityscapes",
    title="Cityscapes",
    load=load_masks,
    num_classes=19,
    shape=(3, 1024, 2048),
    num_train=2_975,
    num_test=500,
    folders=("cityscapes", "Cityscapes"),
    patterns=("leftImg8bit/train",),
    how=(
        "It is given out by cityscapes-dataset.com after registration: unpack leftImg8bit_trainvaltest.zip and "
        "gtFine_trainvaltest.zip into ROOT/cityscapes."
    ),
)
CAMVID = Source(
    name="camvid",
    title="CamVid",
    load=load_masks,
    num_classes=len(CAMVID_CLASSES),
    shape=(3, 360, 480),
    num_train=367,
    num_test=233,
    folders=("camvid", "CamVid"),
    patterns=("trainannot",),
    how="Put the pictures and masks of SegNet's split into ROOT/camvid: train, trainannot, test, testannot.",
)
