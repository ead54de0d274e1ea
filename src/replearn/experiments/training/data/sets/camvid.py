"""CamVid (Brostow, Fauqueur, Cipolla 2009): road scenes of 480x360, 11 classes and void; 367 + 233 pictures.

camvid/{train,val,test}/NAME.* and camvid/{train,val,test}annot/NAME.*, masks with the classes 0 to 10 and 11 for
void; the split of SegNet. Trained on train and tested on test.
"""

import torch

from ..scenes import UNKNOWN, VOID, Defects, SegmentationSet, list_pairs
from ..source import Root, Source, check_counts, locate

CLASSES = (
    *("sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian"),
    "bicyclist",
)
SOURCE = Source(
    name="camvid",
    title="CamVid",
    num_classes=len(CLASSES),
    shape=(3, 360, 480),
    num_train=367,
    num_test=233,
    folders=("camvid", "CamVid"),
    signs=("trainannot",),
    how="Put the pictures and masks of SegNet's split into ROOT/camvid: train, trainannot, test, testannot.",
)


def load(root: Root = None, strict_counts: bool = True, defects: Defects | None = None) -> SegmentationSet:
    folder = locate(SOURCE, root)
    numbers = torch.full((256,), UNKNOWN, dtype=torch.int16)
    numbers[: len(CLASSES)] = torch.arange(len(CLASSES), dtype=torch.int16)
    numbers[len(CLASSES)] = numbers[VOID] = VOID
    train, test = (list_pairs(folder / part, folder / f"{part}annot") for part in ("train", "test"))
    found = SegmentationSet(name=SOURCE.name, class_names=CLASSES, numbers=numbers, train=train, test=test)
    if strict_counts and (defects is None or defects.policy == "refuse"):
        check_counts(SOURCE, folder, found)
    return found
