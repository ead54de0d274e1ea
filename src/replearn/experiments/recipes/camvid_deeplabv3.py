"""DeepLabV3-R50 on CamVid, from scratch: segmentation that learns in minutes.

Command: replearn compare camvid_deeplabv3 --seeds 0 --epochs 20 --methods e2e,repl,repl-reduced
Expected: E2E 38.97, RepL 38.78, RepL reduced 39.41 % mean IoU; one seed, so undecided
Seeds: one, 0
Hardware: one H200
Time: 2 minutes for the three runs
Backed by: benchmarks/results/camvid_deeplabv3_20_epochs

The full 40 epochs, and more seeds, are not yet measured. In turns (`replearn bench epochs camvid_deeplabv3`), over
E2E: removal 0.893 of the time, RepL 0.976, RepL reduced 0.940; the printed operator costs what its block does.
367 road scenes of 480x360 for training, 233 for the test, 11 classes. The rows, poly decay and the auxiliary
head are those of tab_cityscapes_deeplabv3_r50. For random weights and few steps: SGD 0.05 with a warm-up of two
epochs, 40 epochs, crop 320, gradients clipped, bfloat16.
"""

from __future__ import annotations

from dataclasses import replace

from ..training.recipe import Augment, Optimizer, Schedule, Segmentation
from . import tab_cityscapes_deeplabv3_r50

RECIPE = replace(
    tab_cityscapes_deeplabv3_r50.RECIPE,
    name="camvid_deeplabv3",
    table="",
    data=("camvid",),
    epochs=40,
    segmentation=Segmentation(crop=320, auxiliary=0.4),
    optimizer=Optimizer(name="sgd", lr=0.05, momentum=0.9, nesterov=False, weight_decay=1e-4),
    schedule=Schedule(name="poly", power=0.9, warmup_epochs=2),
    augment={"camvid": Augment(flip=True)},
    clip_norm=5.0,
    precision="bfloat16",
    channels_last=True,
    paper=(),
)
