"""RetinaNet-R50-FPN on COCO from scratch (table tab:coco_detection).

Command: replearn compare tab_coco_detection_r50 --seeds 0,1,2
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

mAP, AP50 and AP75 on val2017. The paper gives Adam 4e-5, batch 8 and 100 epochs. Ours, where it is silent:
pictures of 800 pixels at the shorter side and 1333 at most, flipped or not, a constant rate, no weight decay,
tf32. Wrong boxes and broken pictures are left out and named in the result (bad_data=skip): nobody can mend
118,287 pictures.
"""

from __future__ import annotations

from ..training.recipe import Augment, Recipe
from ._paper import E2E_REPL, printed
from ._scenes import ADAM, CONSTANT, ROWS

RECIPE = Recipe(
    name="tab_coco_detection_r50",
    table="tab:coco_detection",
    task="detection",
    model="retinanet_resnet50",
    data=("coco",),
    variants=ROWS,
    epochs=100,
    batch_size=8,
    optimizer=ADAM,
    schedule=CONSTANT,
    augment={"coco": Augment(flip=True)},
    bad_data="skip",
    precision="tf32",
    paper=printed("tab:coco_detection", "RetinaNet-R50", E2E_REPL),
)
