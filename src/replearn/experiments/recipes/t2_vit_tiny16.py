"""ViT-Tiny/16 on ImageNet (table t2).

Command: replearn compare t2_vit_tiny16 --seeds 0,1,2
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: four GPUs (torchrun), or one with patience
Time: not yet measured
Backed by: not yet measured

2 of 12 blocks are replaced by the printed equation, 3 with first=2, under which the paper's savings come out.
The paper gives batch 1024, AdamW with a rate of 7.5e-4, a random 224x224 crop and flips. Ours, where it is
silent: 90 epochs as for its ResNets, weight decay 0.05, cosine decay after a warm-up of 5 epochs.
"""

from __future__ import annotations

from ..training.recipe import Recipe
from ._paper import (
    BOTH_PLACEMENTS,
    COSINE,
    E2E,
    EITHER_REMOVAL,
    IMAGENET_ADAMW,
    IMAGENET_AUGMENT,
    SKIP_ATTENTION,
    WITH_SKIP,
    printed,
)

RECIPE = Recipe(
    name="t2_vit_tiny16",
    table="t2",
    model="vit_tiny_16",
    data=("imagenet",),
    variants=(E2E, SKIP_ATTENTION, *BOTH_PLACEMENTS),
    epochs=90,
    batch_size=1024,
    optimizer=IMAGENET_ADAMW,
    schedule=COSINE,
    augment=IMAGENET_AUGMENT,
    precision="tf32",
    paper=(*printed("t2", "ViT-T/16", WITH_SKIP), *printed("t4", "ViT-Tiny/16", EITHER_REMOVAL)),
)
