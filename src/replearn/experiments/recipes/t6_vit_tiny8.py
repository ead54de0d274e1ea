"""ViT-Tiny/8 on CIFAR-10 with one neighbour as source, or both (table t6).

Command: replearn compare t6_vit_tiny8 --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_vit_tiny8, with first=2: 3 of 12 blocks. The paper's row without either neighbour is E2E.
"""

from __future__ import annotations

from dataclasses import replace

from ...operators.projection import Projection
from . import t1_vit_tiny8
from ._paper import E2E, SOURCES, printed, removal, repl

RECIPE = replace(
    t1_vit_tiny8.RECIPE,
    name="t6_vit_tiny8",
    table="t6",
    data=("cifar10",),
    variants=(
        E2E,
        removal(first=2),
        repl("RepL next", first=2, operator=Projection(sources="next")),
        repl("RepL previous", first=2, operator=Projection(sources="previous")),
        repl("RepL both", first=2, operator=Projection(sources="both")),
    ),
    paper=printed("t6", "ViT-Tiny/8", SOURCES),
)
