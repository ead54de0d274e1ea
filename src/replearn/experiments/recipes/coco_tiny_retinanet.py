"""RetinaNet-R50-FPN on 50 pictures of COCO: whether all of it runs on real pictures and real annotations.

Command: replearn compare coco_tiny_retinanet --seeds 0
Expected: not yet measured
Seeds: one, 0
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

As tab_coco_detection_r50, for two epochs and at 480 pixels. Fifty pictures teach no detector: its mAP means
nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ..training.recipe import Augment, Detection
from . import tab_coco_detection_r50

RECIPE = replace(
    tab_coco_detection_r50.RECIPE,
    name="coco_tiny_retinanet",
    table="",
    data=("coco_tiny",),
    epochs=2,
    detection=Detection(min_size=(480,), max_size=800),
    augment={"coco_tiny": Augment(flip=True)},
    bad_data="refuse",
    paper=(),
)
