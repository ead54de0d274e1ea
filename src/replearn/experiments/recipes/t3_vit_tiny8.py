"""ViT-Tiny/8 on CIFAR-10: are computing layers better than no layers (table t3)?

Command: replearn compare t3_vit_tiny8 --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_vit_tiny8. The paper's "- 25 % layers" is `removal`, its "+ computing layers" is `RepL`; 25 % are
3 of 12 blocks, which first=2 gives and the printed equation does not.
"""

from __future__ import annotations

from dataclasses import replace

from . import t1_vit_tiny8
from ._paper import BOTH_PLACEMENTS, E2E, EITHER_REMOVAL, REPL, printed

RECIPE = replace(
    t1_vit_tiny8.RECIPE,
    name="t3_vit_tiny8",
    table="t3",
    data=("cifar10",),
    variants=(E2E, *BOTH_PLACEMENTS),
    paper=printed("t3", "ViT-Tiny/8", {"E2E": "E2E", **EITHER_REMOVAL, "+ computing layers": REPL}),
)
