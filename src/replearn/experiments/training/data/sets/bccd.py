"""BCCD: blood cells under a microscope, 364 pictures of 640x480 in COCO's format; red and white cells, platelets.

bccd/{train,val,test}/*.jpg and bccd/annotations/instances_{train,val,test}.json; MIT. Trained on the 205
pictures of train and tested on the 72 of test.
"""

from functools import partial

from ..coco import annotation_files, load_parts
from ..source import Source

SOURCE = Source(
    name="bccd",
    title="BCCD",
    num_classes=3,
    shape=(3, 480, 640),
    num_train=205,
    num_test=72,
    folders=("bccd",),
    signs=annotation_files(train="train", test="test"),
    how="Put the pictures and instances_{train,test}.json (COCO's format) into ROOT/bccd, as its file describes.",
)
load = partial(load_parts, SOURCE)
