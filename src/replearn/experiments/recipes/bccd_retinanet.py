"""RetinaNet-R50-FPN on blood cells (BCCD), from scratch: detection that learns in minutes.

Command: replearn compare bccd_retinanet --seeds 0 --epochs 20 --methods e2e,repl,repl-reduced
Expected: E2E 53.27, RepL 52.66, RepL reduced 53.70 mAP; one seed, so undecided
Seeds: one, 0
Hardware: one H200
Time: 3.5 minutes for the three runs
Backed by: benchmarks/results/bccd_retinanet_20_epochs

The full 40 epochs, and more seeds, are not yet measured. Memory was 0.95 and 0.94 of E2E's. An epoch took 1.58 s
end to end, 1.88 s with RepL and 1.83 s reduced, one run after another: steps of 8 pictures wait for Python, and
epochs of one run differed by a quarter; what the ratio is in turns is not yet measured.
205 pictures of 640x480 for training, 72 for the test, three classes. The rows are those of
tab_coco_detection_r50. Adam at the paper's 4e-5 is too slow for so few steps: 2e-4 with a warm-up of two epochs
and cosine decay, 40 epochs, pictures at 384 pixels, bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

from ..training.recipe import Augment, Detection, Optimizer, Schedule
from . import tab_coco_detection_r50

RECIPE = replace(
    tab_coco_detection_r50.RECIPE,
    name="bccd_retinanet",
    table="",
    data=("bccd",),
    epochs=40,
    detection=Detection(min_size=(384,), max_size=512),
    optimizer=Optimizer(name="adam", lr=2e-4, weight_decay=0.0),
    schedule=Schedule(name="cosine", warmup_epochs=2),
    augment={"bccd": Augment(flip=True)},
    clip_norm=1.0,
    bad_data="refuse",
    precision="bfloat16",
    channels_last=True,
    paper=(),
)
