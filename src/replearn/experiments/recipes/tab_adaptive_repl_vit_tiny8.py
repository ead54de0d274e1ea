"""ViT-Tiny/8 on CIFAR-10: targets chosen anew each epoch, or fixed (table tab:adaptive_repl).

Command: replearn compare tab_adaptive_repl_vit_tiny8 --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_vit_tiny8, with first=2: 3 of 12 blocks.
"""

from __future__ import annotations

from dataclasses import replace

from ..training.recipe import Variant
from . import t1_vit_tiny8
from ._paper import E2E, printed, removal, repl, same

RECIPE = replace(
    t1_vit_tiny8.RECIPE,
    name="tab_adaptive_repl_vit_tiny8",
    table="tab:adaptive_repl",
    data=("cifar10",),
    variants=(
        E2E,
        removal(first=2),
        repl("Fixed-RepL", first=2),
        Variant(label="Adaptive-RepL", method="adaptive", first=2),
    ),
    paper=(
        *printed("t1", "ViT-Tiny/8", {"E2E": "E2E"}, data="cifar10"),
        *printed("tab:adaptive_repl", "ViT-Tiny/8", same("Fixed-RepL", "Adaptive-RepL")),
    ),
)
