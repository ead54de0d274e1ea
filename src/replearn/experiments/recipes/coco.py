"""Detection: RetinaNet on COCO from scratch (table tab:coco_detection), and on smaller sets.

Command: replearn compare NAME --seeds 0,1,2
Seeds: three, 0 to 2
Hardware: one GPU

mAP, AP50 and AP75 on val2017. Not given by the paper: pictures of 800 pixels at the shorter side and 1333 at
most, flips, a constant rate, no weight decay, tf32; its savings come out under first=2.

## tab_coco_detection_r50: RetinaNet-R50-FPN on COCO
## tab_coco_detection_r101: RetinaNet-R101-FPN on COCO
## bccd_retinanet: RetinaNet-R50-FPN on blood cells (BCCD): detection that learns in minutes
Command: replearn compare bccd_retinanet --seeds 0 --epochs 20 --methods e2e,repl,repl-reduced
Expected: E2E 53.27, RepL 52.66, RepL reduced 53.70; all differences are undecided
Seeds: one, 0
Hardware: one H200
Time: 3.5 minutes for the three runs
Backed by: benchmarks/results/bccd_retinanet_20_epochs.jsonl

205 pictures of 640x480 for training, 72 for the test, three classes; Adam at the paper's 4e-5 is too slow for so
few steps. Memory is 0.95 and 0.94 of E2E's (reduced); steps of 8 pictures wait for Python."""

from dataclasses import replace

from ..training.recipe import Augment, Detection, Optimizer, Recipe, Schedule
from ._paper import E2E_REPL, SCENES, printed

R50 = Recipe(
    name="tab_coco_detection_r50",
    table="tab:coco_detection",
    task="detection",
    model="retinanet_resnet50",
    data=("coco",),
    variants=SCENES,
    epochs=100,
    batch_size=8,
    optimizer=Optimizer(name="adam", lr=4e-5, weight_decay=0.0),
    schedule=Schedule(name="constant"),
    augment={"coco": Augment(flip=True)},
    precision="tf32",
    paper=printed("tab:coco_detection", "RetinaNet-R50", E2E_REPL),
)
R101 = replace(
    R50,
    name="tab_coco_detection_r101",
    model="retinanet_resnet101",
    paper=printed("tab:coco_detection", "RetinaNet-R101", E2E_REPL),
)
BCCD = replace(
    R50,
    name="bccd_retinanet",
    table="",
    data=("bccd",),
    epochs=40,
    detection=Detection(min_size=384, max_size=512),
    optimizer=Optimizer(name="adam", lr=2e-4, weight_decay=0.0),
    schedule=Schedule(name="cosine", warmup_epochs=2),
    augment={"bccd": Augment(flip=True)},
    clip_norm=1.0,
    precision="bfloat16",
    channels_last=True,
    paper=(),
)
