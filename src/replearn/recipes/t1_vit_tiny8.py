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
    SKIP_ATTENTION,
    SMALL_ADAMW,
    SMALL_AUGMENT,
    SMALL_SETS,
    either,
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
    paper=(
        printed("cifar10", "E2E", 72.77, 1.31, 2.81, 6.81),
        printed("cifar10", "Skip-Attention", 72.60, 3.57, 2.12, 6.23),
        *either(printed("cifar10", "removal", 71.13, 1.24, 2.04, 5.44)),  # from table t3
        *either(printed("cifar10", "RepL", 73.71, 1.08, 2.08, 5.65)),
        printed("svhn", "E2E", 85.99, 0.71, 2.81, 10.07),
        printed("svhn", "Skip-Attention", 86.22, 1.51, 2.12, 9.18),
        *either(printed("svhn", "RepL", 86.67, 1.18, 2.08, 8.08)),
        printed("stl10", "E2E", 49.08, 3.39, 2.81, 2.93),
        printed("stl10", "Skip-Attention", 50.42, 3.18, 2.12, 2.68),
        *either(printed("stl10", "RepL", 50.66, 3.18, 2.08, 2.41)),
    ),
)
