"""Street scenes with a class at every pixel.

Cityscapes (Cordts et al. 2016): cityscapes/leftImg8bit/{train,val}/CITY/CITY_*_leftImg8bit.png and
cityscapes/gtFine/{train,val}/CITY/CITY_*_gtFine_labelIds.png. The official scripts number 34 labels and train on
19 of them; the others are void. The test part here is val: the official test part has no masks.

CamVid (Brostow et al. 2009): camvid/{train,test}/NAME.* and camvid/{train,test}annot/NAME.*, masks with classes
0 to 10 and 11 for void; the split of SegNet.
"""

from pathlib import Path

import torch

from .....errors import ReplearnError
from ..scenes import UNKNOWN, VOID, Defects, Pair, SegmentationSet, list_pairs
from ..source import Root, Source, check_counts, locate

LAST_LABEL = 33  # -1, a licence plate, is 255 in a mask
PICTURE, MASK = "_leftImg8bit.png", "_gtFine_labelIds.png"
CAMVID_CLASSES = (
    *("sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian"),
    "bicyclist",
)


def load_masks(
    source: Source, root: Root = None, strict_counts: bool = True, defects: Defects | None = None
) -> SegmentationSet:
    folder = locate(source, root)
    found = (cityscapes if source.name == "cityscapes" else camvid)(folder)
    if strict_counts and (defects is None or defects.policy == "refuse"):
        check_counts(source, folder, found)
    return found


def cityscapes(folder: Path) -> SegmentationSet:
    names, numbers = official_classes()
    train, test = pairs(folder, "train"), pairs(folder, "val")
    return SegmentationSet(name="cityscapes", class_names=names, numbers=numbers, train=train, test=test)


def camvid(folder: Path) -> SegmentationSet:
    numbers = torch.full((256,), UNKNOWN, dtype=torch.int16)
    numbers[: len(CAMVID_CLASSES)] = torch.arange(len(CAMVID_CLASSES), dtype=torch.int16)
    numbers[len(CAMVID_CLASSES)] = numbers[VOID] = VOID
    train, test = (list_pairs(folder / part, folder / f"{part}annot") for part in ("train", "test"))
    return SegmentationSet(name="camvid", class_names=CAMVID_CLASSES, numbers=numbers, train=train, test=test)


def official_classes() -> tuple[tuple[str, ...], torch.Tensor]:
    """Cityscapes' 19 classes, and a mask's label id to the class that is trained, or VOID."""
    from torchvision.datasets import Cityscapes

    labels = {label.id: label.name for label in Cityscapes.classes if not label.ignore_in_eval}
    numbers = torch.full((256,), UNKNOWN, dtype=torch.int16)
    numbers[: LAST_LABEL + 1] = numbers[VOID] = VOID
    numbers[list(labels)] = torch.arange(len(labels), dtype=torch.int16)
    return tuple(labels.values()), numbers


def pairs(folder: Path, part: str) -> tuple[Pair, ...]:
    pictures = sorted((folder / "leftImg8bit" / part).glob(f"*/*{PICTURE}"))
    if not pictures:
        raise ReplearnError(f"{folder / 'leftImg8bit' / part} holds no CITY/*{PICTURE}. {CITYSCAPES.how}")
    found = []
    for path in pictures:
        mask = folder / "gtFine" / part / path.parent.name / (path.name.removesuffix(PICTURE) + MASK)
        if not mask.is_file():
            raise ReplearnError(f"{path} has no mask: there is no {mask}. {CITYSCAPES.how}")
        found.append(Pair(path, mask))
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
    signs=("leftImg8bit/train",),
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
    signs=("trainannot",),
    how="Put the pictures and masks of SegNet's split into ROOT/camvid: train, trainannot, test, testannot.",
)
