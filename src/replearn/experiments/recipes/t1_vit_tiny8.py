"""ViT-Tiny/8 on CIFAR-10, SVHN and STL-10 (table t1).

Command: replearn compare t1_vit_tiny8 --data cifar10 --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Both placements: the printed equation replaces 2 of 12 blocks, first=2 replaces 3, and under that one the
paper's savings come out. The operator is the projection, the paper's basic form for a ViT.
Ours, where the paper is silent: weight decay 0.05, cosine decay after a warm-up of 5 epochs, zeros as padding
on SVHN and STL-10.
"""

from __future__ import annotations

from ..training.recipe import Recipe
from ._paper import (
    BOTH_PLACEMENTS,
    COSINE,
    E2E,
    EITHER_REMOVAL,
    SKIP_ATTENTION,
    SMALL_ADAMW,
    SMALL_AUGMENT,
    SMALL_SETS,
    WITH_SKIP,
    printed,
)

RECIPE = Recipe(
    name="t1_vit_tiny8",
    table="t1",
    model="vit_tiny_8",
    data=SMALL_SETS,
    variants=(E2E, SKIP_ATTENTION, *BOTH_PLACEMENTS),
    epochs=250,
    batch_size=512,
    optimizer=SMALL_ADAMW,
    schedule=COSINE,
    augment=SMALL_AUGMENT,
    precision="tf32",
    paper=(*printed("t1", "ViT-Tiny/8", WITH_SKIP), *printed("t3", "ViT-Tiny/8", EITHER_REMOVAL)),
)
