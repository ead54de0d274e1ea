"""A hundred pictures of COCO 2017 in its layout, 50 for training and 50 for tests: to see that things run."""

from dataclasses import replace
from functools import partial

from ..coco import load_parts
from .coco import SOURCE as COCO

SOURCE = replace(
    COCO,
    name="coco_tiny",
    title="tiny COCO",
    num_train=50,
    num_test=50,
    folders=("coco-tiny",),
    how="Put 50 pictures of each part of COCO, and annotation files that list these alone, into ROOT/coco-tiny.",
)
load = partial(load_parts, SOURCE)
