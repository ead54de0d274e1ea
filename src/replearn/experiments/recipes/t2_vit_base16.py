"""ViT-Base/16 on ImageNet (table t2).

Command: replearn compare t2_vit_base16 --seeds 0,1,2
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: four GPUs (torchrun), or one with patience
Time: not yet measured
Backed by: not yet measured

2 of 12 blocks are replaced by the printed equation, 3 with first=2, under which the paper's savings come out.
The paper says nothing on how its ViT-Base was trained: batch 1024 and AdamW with a rate of 7.5e-4 are what it
gives for ViT-Small, and the random 224x224 crop and flips are its own. Ours: 90 epochs as for its ResNets, weight
decay 0.05, cosine decay after a warm-up of 5 epochs.
"""

from __future__ import annotations

from ..training.recipe import Recipe
from ._paper import (
    BOTH_PLACEMENTS,
    COSINE,
    E2E,
    IMAGENET_ADAMW,
    IMAGENET_AUGMENT,
    SKIP_ATTENTION,
    WITH_SKIP,
    printed,
)

RECIPE = Recipe(
    name="t2_vit_base16",
    table="t2",
    model="vit_base_16",
    data=("imagenet",),
    variants=(E2E, SKIP_ATTENTION, *BOTH_PLACEMENTS),
    epochs=90,
    batch_size=1024,
    optimizer=IMAGENET_ADAMW,
    schedule=COSINE,
    augment=IMAGENET_AUGMENT,
    precision="tf32",
    paper=printed("t2", "ViT-B/16", WITH_SKIP),
)
