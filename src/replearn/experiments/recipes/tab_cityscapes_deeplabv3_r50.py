"""DeepLabV3-R50 on Cityscapes, fine-tuned (table tab:cityscapes_finetune).

Command: replearn compare tab_cityscapes_deeplabv3_r50 --seeds 0,1,2 --pretrained FILE
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Overall accuracy, mean accuracy and mean IoU on val. The paper starts from RepL models trained on ImageNet-1K:
FILE names one for each row, as runs/imagenet/{method}/seed-0/model.safetensors. It gives SGD 0.1, batch 16,
crop 768 and 30,000 steps, which are 162 epochs. Ours, where it is silent: poly decay with power 0.9, weight
decay 1e-4, scales from 0.5 to 2, flips, an auxiliary head of weight 0.4, whole pictures in tests
(segmentation.evaluation=sliding for windows).
"""

from __future__ import annotations

from ..training.recipe import Augment, Recipe, Segmentation
from ._paper import E2E_REPL, printed
from ._scenes import POLY, POLY_SGD, ROWS

RECIPE = Recipe(
    name="tab_cityscapes_deeplabv3_r50",
    table="tab:cityscapes_finetune",
    task="segmentation",
    model="deeplabv3_resnet50",
    data=("cityscapes",),
    variants=ROWS,
    epochs=162,
    batch_size=16,
    segmentation=Segmentation(crop=768, auxiliary=0.4),
    optimizer=POLY_SGD,
    schedule=POLY,
    augment={"cityscapes": Augment(flip=True)},
    precision="tf32",
    paper=printed("tab:cityscapes_finetune", "DeepLabV3-R50", E2E_REPL),
)
