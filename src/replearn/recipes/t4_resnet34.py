"""ResNet-34 on ImageNet: are computing layers better than no layers (table t4)?

Command: replearn compare t4_resnet34 --seeds 0,1,2
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: four GPUs (torchrun), or one with patience
Time: not yet measured
Backed by: not yet measured

Trained as t2_resnet34. The paper's "- 25 % layers" is `removal`, its "+ computing layers" is `RepL`; 25 % are
4 of 16 blocks, which first=2 gives and the printed equation does not.
"""

from __future__ import annotations

from dataclasses import replace

from . import t2_resnet34
from ._paper import BOTH_PLACEMENTS, E2E, either, printed

RECIPE = replace(
    t2_resnet34.RECIPE,
    name="t4_resnet34",
    table="t4",
    variants=(E2E, *BOTH_PLACEMENTS),
    paper=(
        printed("imagenet", "E2E", 74.82, 1.43, 9.21, 463.23, 91.04, 1.33),
        *either(printed("imagenet", "removal", 72.99, 1.82, 7.75, 392.21, 90.12, 1.31)),
        *either(printed("imagenet", "RepL", 75.44, 1.27, 8.06, 410.53, 91.47, 2.01)),
    ),
)
