"""ResNet-110 on CIFAR-10 with intervals K = 2, 4 and 6 (table t5).

Command: replearn compare t5_resnet110 --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_resnet110; 24, 12 and 6 of 54 blocks are replaced. Removal at each interval is beside it, as the
floor that the paper does not print.
"""

from __future__ import annotations

from dataclasses import replace

from . import t1_resnet110
from ._paper import E2E, printed, removal, repl

RECIPE = replace(
    t1_resnet110.RECIPE,
    name="t5_resnet110",
    table="t5",
    data=("cifar10",),
    variants=(
        E2E,
        removal("removal K=2", interval=2),
        repl("RepL K=2", interval=2),
        removal("removal K=4", interval=4),
        repl("RepL K=4", interval=4),
        removal("removal K=6", interval=6),
        repl("RepL K=6", interval=6),
    ),
    paper=(
        *printed("t1", "ResNet-110", {"E2E": "E2E"}, data="cifar10"),
        *printed("t5", "ResNet-110", {"k=2": "RepL K=2", "k=4": "RepL K=4", "k=6": "RepL K=6"}),
    ),
)
