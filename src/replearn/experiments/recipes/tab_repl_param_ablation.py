"""ViT-Tiny/8 on CIFAR-10: one coefficient for both neighbours, or two (table tab:repl_param_ablation).

Command: replearn compare tab_repl_param_ablation --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_vit_tiny8, with first=2: 3 of 12 blocks.
"""

from __future__ import annotations

from dataclasses import replace

from ...operators.projection import Projection
from . import t1_vit_tiny8
from ._paper import E2E, printed, removal, repl

RECIPE = replace(
    t1_vit_tiny8.RECIPE,
    name="tab_repl_param_ablation",
    table="tab:repl_param_ablation",
    data=("cifar10",),
    variants=(
        E2E,
        removal(first=2),
        repl("RepL 2 parameters", first=2, operator=Projection()),
        repl("RepL 1 parameter", first=2, operator=Projection(coefficients="shared")),
    ),
    paper=(
        *printed("t1", "ViT-Tiny/8", {"E2E": "E2E"}, data="cifar10"),
        *printed(
            "tab:repl_param_ablation",
            "ViT-Tiny/8",
            {"RepL (2 parameters)": "RepL 2 parameters", "RepL (1 parameter)": "RepL 1 parameter"},
        ),
    ),
)
