"""RetinaNet-R50-FPN v2 on COCO as torchvision's reference trains it: the stronger recipe beside the paper's.

Command: replearn compare coco_retinanet_v2 --seeds 0 --pretrained FILE
Expected: not yet measured
Seeds: one, 0
Hardware: eight GPUs
Time: not yet measured
Backed by: not yet measured

26 epochs of AdamW 1e-4 with weight decay 0.05 (none on norms and biases), divided by ten after 16 and 22, batch
16, the shorter side from 480 to 800 pixels, pictures without boxes left out, GIoU loss and GroupNorm in the
head. FILE is a ResNet-50 trained on ImageNet, with {method} in its name where each row has its own. Without it:
from scratch. Unlike the reference, BatchNorms go on learning and no stage is frozen, so that replaced blocks
are trained alike.
"""

from __future__ import annotations

from dataclasses import replace

from ..training.recipe import Detection, Optimizer, Schedule
from . import tab_coco_detection_r50

RECIPE = replace(
    tab_coco_detection_r50.RECIPE,
    name="coco_retinanet_v2",
    table="",
    model="retinanet_v2_resnet50",
    epochs=26,
    batch_size=16,
    detection=Detection(min_size=(480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800), keep_empty=False),
    optimizer=Optimizer(name="adamw", lr=1e-4, weight_decay=0.05, decay_vectors=False),
    schedule=Schedule(name="step", milestones=(16 / 26, 22 / 26)),
    precision="bfloat16",
    paper=(),
)
