"""A hundred pictures of COCO 2017 in its layout, 50 for training and 50 for tests: to see that things run.

coco-tiny/train2017, coco-tiny/val2017 and coco-tiny/annotations, with official pictures and annotations.
"""

from __future__ import annotations

from functools import partial

from ..coco import COCO_2017, load_parts
from ..source import Layout, Source

SOURCE = Source(
    name="coco_tiny",
    title="tiny COCO",
    num_classes=80,
    shape=(3, 480, 640),
    num_train=50,
    num_test=50,
    layouts=(Layout(name="COCO", folders=("coco-tiny",), signs=COCO_2017.signs),),
    how="Put 50 pictures of each part of COCO, and annotation files that list these alone, into ROOT/coco-tiny.",
)
load = partial(load_parts, SOURCE, COCO_2017)
