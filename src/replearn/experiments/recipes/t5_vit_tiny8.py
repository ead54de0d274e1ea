"""ViT-Tiny/8 on CIFAR-10 with intervals K = 2, 4 and 6 (table t5).

Command: replearn compare t5_vit_tiny8 --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_vit_tiny8. The printed equation replaces 5, 2 and 1 of 12 blocks; first=2 replaces 5, 3 and 2,
which is what the paper's memory (0.60, 0.74 and 0.85 of E2E) says. Removal at each placement is beside it, as
the floor that the paper does not print.
"""

from __future__ import annotations

from dataclasses import replace

from . import t1_vit_tiny8
from ._paper import E2E, either, printed, removal, repl

RECIPE = replace(
    t1_vit_tiny8.RECIPE,
    name="t5_vit_tiny8",
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
        removal("removal K=4 first=2", interval=4, first=2),
        repl("RepL K=4 first=2", interval=4, first=2),
        removal("removal K=6 first=2", interval=6, first=2),
        repl("RepL K=6 first=2", interval=6, first=2),
    ),
    paper=(
        *printed("t1", "ViT-Tiny/8", {"E2E": "E2E"}, data="cifar10"),
        *printed(
            "t5",
            "ViT-Tiny/8",
            {"k=2": "RepL K=2", "k=4": either("RepL K=4"), "k=6": either("RepL K=6")},
        ),
    ),
)
