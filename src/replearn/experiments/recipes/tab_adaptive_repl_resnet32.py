"""ResNet-32 on CIFAR-10: targets chosen anew each epoch, or fixed (table tab:adaptive_repl).

Command: replearn compare tab_adaptive_repl_resnet32 --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_resnet32.
"""

from __future__ import annotations

from dataclasses import replace

from ..training.recipe import Variant
from . import t1_resnet32
from ._paper import E2E, printed, removal, repl, same

RECIPE = replace(
    t1_resnet32.RECIPE,
    name="tab_adaptive_repl_resnet32",
    table="tab:adaptive_repl",
    data=("cifar10",),
    variants=(
        E2E,
        removal(),
        repl("Fixed-RepL"),
        Variant(label="Adaptive-RepL", method="adaptive"),
    ),
    paper=(
        *printed("t1", "ResNet-32", {"E2E": "E2E"}, data="cifar10"),
        *printed("tab:adaptive_repl", "ResNet-32", same("Fixed-RepL", "Adaptive-RepL")),
    ),
)
