"""ResNet-34 on ImageNet (table t2).

Command: replearn compare t2_resnet34 --seeds 0,1,2
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: four GPUs (torchrun), or one with patience
Time: not yet measured
Backed by: not yet measured

1 of 16 blocks is replaced by the printed equation, 4 with first=2.
The paper gives batch 512, SGD with a rate of 0.2, 90 epochs, a random 224x224 crop and flips. Ours, where it is
silent: Nesterov momentum 0.9, weight decay 1e-4, cosine decay after a warm-up of 5 epochs.
"""

from __future__ import annotations

from ..training.recipe import Recipe
from ._paper import BOTH_PLACEMENTS, COSINE, E2E, EITHER, EITHER_REMOVAL, IMAGENET_AUGMENT, IMAGENET_SGD, printed

RECIPE = Recipe(
    name="t2_resnet34",
    table="t2",
    model="resnet34",
    data=("imagenet",),
    variants=(E2E, *BOTH_PLACEMENTS),
    epochs=90,
    batch_size=512,
    optimizer=IMAGENET_SGD,
    schedule=COSINE,
    augment=IMAGENET_AUGMENT,
    precision="tf32",
    channels_last=True,
    paper=(*printed("t2", "ResNet-34", EITHER), *printed("t4", "ResNet-34", EITHER_REMOVAL)),
)
