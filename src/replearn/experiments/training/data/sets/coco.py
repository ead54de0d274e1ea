"""COCO 2017 (Lin et al. 2014): 118,287 + 5,000 pictures, boxes of 80 categories.

coco/train2017/*.jpg, coco/val2017/*.jpg and coco/annotations/instances_{train,val}2017.json. The test part here is
val2017, as everywhere: the boxes of the official test part are not given out.
"""

from functools import partial

from ..coco import annotation_files, load_parts
from ..source import Source

SOURCE = Source(
    name="coco",
    title="COCO 2017",
    num_classes=80,
    shape=(3, 480, 640),
    num_train=118_287,
    num_test=5_000,
    folders=("coco", "coco2017", "COCO"),
    signs=annotation_files(),
    how=(
        "Get train2017.zip, val2017.zip and annotations_trainval2017.zip from cocodataset.org and unpack them "
        "into ROOT/coco."
    ),
)
load = partial(load_parts, SOURCE)
