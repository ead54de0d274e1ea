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
from ._paper import COSINE, E2E, SMALL_AUGMENT, SMALL_SETS, SMALL_SGD, printed, removal, repl

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
    paper=(
        printed("cifar10", "E2E", 93.49, 0.29, 9.31, 26.19),
        printed("cifar10", "removal", 92.62, 2.01, 7.07, 19.54),  # from table t3
        printed("cifar10", "RepL", 94.01, 0.17, 7.62, 20.93),
        printed("svhn", "E2E", 96.93, 0.24, 9.31, 37.38),
        printed("svhn", "RepL", 97.06, 0.27, 7.62, 30.08),
        printed("stl10", "E2E", 79.78, 0.30, 9.31, 6.86),
        printed("stl10", "RepL", 80.45, 0.51, 7.62, 5.23),
    ),
)
