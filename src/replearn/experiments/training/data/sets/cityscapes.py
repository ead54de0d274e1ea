"""Cityscapes (Cordts et al. 2016): 2,975 + 500 street scenes of 2048x1024 with fine masks, 19 classes.

cityscapes/leftImg8bit/{train,val}/CITY/CITY_*_leftImg8bit.png and
cityscapes/gtFine/{train,val}/CITY/CITY_*_gtFine_labelIds.png. The official scripts number 34 labels and train on
19 of them; the others are void (`LABELS`). The test part here is val: the official test part has no masks.
"""

from pathlib import Path

import torch

from .....errors import ReplearnError
from ..scenes import UNKNOWN, VOID, Defects, Pair, SegmentationSet
from ..source import Root, Source, check_counts, locate

LABELS = {  # the official label id to the class, in the order of the official train ids
    7: "road",
    8: "sidewalk",
    11: "building",
    12: "wall",
    13: "fence",
    17: "pole",
    19: "traffic light",
    20: "traffic sign",
    21: "vegetation",
    22: "terrain",
    23: "sky",
    24: "person",
    25: "rider",
    26: "car",
    27: "truck",
    28: "bus",
    31: "train",
    32: "motorcycle",
    33: "bicycle",
}
LAST_LABEL = 33  # -1, a licence plate, is 255 in a mask
PICTURE, MASK = "_leftImg8bit.png", "_gtFine_labelIds.png"
SOURCE = Source(
    name="cityscapes",
    title="Cityscapes",
    num_classes=len(LABELS),
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


def load(root: Root = None, strict_counts: bool = True, defects: Defects | None = None) -> SegmentationSet:
    folder = locate(SOURCE, root)
    train, test, numbers = pairs(folder, "train"), pairs(folder, "val"), official_numbers()
    found = SegmentationSet(
        name=SOURCE.name, class_names=tuple(LABELS.values()), numbers=numbers, train=train, test=test
    )
    if strict_counts and (defects is None or defects.policy == "refuse"):
        check_counts(SOURCE, folder, found)
    return found


def official_numbers() -> torch.Tensor:
    """The official mapping: a mask's label id to the class that is trained, or VOID."""
    numbers = torch.full((256,), UNKNOWN, dtype=torch.int16)
    numbers[: LAST_LABEL + 1] = numbers[VOID] = VOID
    for number, label in enumerate(LABELS):
        numbers[label] = number
    return numbers


def pairs(folder: Path, part: str) -> tuple[Pair, ...]:
    pictures = sorted((folder / "leftImg8bit" / part).glob(f"*/*{PICTURE}"))
    if not pictures:
        raise ReplearnError(f"{folder / 'leftImg8bit' / part} holds no CITY/*{PICTURE}. {SOURCE.how}")
    found = []
    for path in pictures:
        mask = folder / "gtFine" / part / path.parent.name / (path.name.removesuffix(PICTURE) + MASK)
        if not mask.is_file():
            raise ReplearnError(f"{path} has no mask: there is no {mask}. {SOURCE.how}")
        found.append(Pair(path, mask))
    return tuple(found)
