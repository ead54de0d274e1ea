"""ResNet-110 on CIFAR-10, SVHN and STL-10 (table t1).

Command: replearn compare t1_resnet110 --data cifar10 --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

12 of 54 blocks are replaced; first=2 would replace as many.
Ours, where the paper is silent: Nesterov momentum 0.9, weight decay 1e-4, cosine decay after a warm-up of 5
epochs (without it a rate of 0.8 does not train), zeros as padding on SVHN and STL-10. Its GPU memory on STL-10
is CIFAR-10's to the digit, which nine times larger images can't have.
"""

from __future__ import annotations

from ..training.recipe import Recipe
from ._paper import (
    COSINE,
    E2E,
    E2E_REPL,
    PLAIN_REMOVAL,
    SMALL_AUGMENT,
    SMALL_SETS,
    SMALL_SGD,
    printed,
    removal,
    repl,
)

RECIPE = Recipe(
    name="t1_resnet110",
    table="t1",
    model="resnet110",
    data=SMALL_SETS,
    variants=(E2E, removal(), repl()),
    epochs=250,
    batch_size=1024,
    optimizer=SMALL_SGD,
    schedule=COSINE,
    augment=SMALL_AUGMENT,
    precision="tf32",
    paper=(*printed("t1", "ResNet-110", E2E_REPL), *printed("t3", "ResNet-110", PLAIN_REMOVAL)),
)
