"""RetinaNet-R101-FPN on COCO from scratch (table tab:coco_detection).

Command: replearn compare tab_coco_detection_r101 --seeds 0,1,2
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

All but the model is as in tab_coco_detection_r50.
"""

from __future__ import annotations

from dataclasses import replace

from . import tab_coco_detection_r50
from ._paper import E2E_REPL, printed

RECIPE = replace(
    tab_coco_detection_r50.RECIPE,
    name="tab_coco_detection_r101",
    model="retinanet_resnet101",
    paper=printed("tab:coco_detection", "RetinaNet-R101", E2E_REPL),
)
