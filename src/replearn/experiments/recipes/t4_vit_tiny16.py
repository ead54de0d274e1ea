"""ViT-Tiny/16 on ImageNet: are computing layers better than no layers (table t4)?

Command: replearn compare t4_vit_tiny16 --seeds 0,1,2
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: four GPUs (torchrun), or one with patience
Time: not yet measured
Backed by: not yet measured

Trained as t2_vit_tiny16. The paper's "- 25 % layers" is `removal`, its "+ computing layers" is `RepL`; 25 % are
3 of 12 blocks, which first=2 gives and the printed equation does not.
"""

from __future__ import annotations

from dataclasses import replace

from . import t2_vit_tiny16
from ._paper import BOTH_PLACEMENTS, E2E, EITHER_REMOVAL, REPL, printed

RECIPE = replace(
    t2_vit_tiny16.RECIPE,
    name="t4_vit_tiny16",
    table="t4",
    variants=(E2E, *BOTH_PLACEMENTS),
    paper=printed("t4", "ViT-Tiny/16", {"E2E": "E2E", **EITHER_REMOVAL, "+ computing layers": REPL}),
)
