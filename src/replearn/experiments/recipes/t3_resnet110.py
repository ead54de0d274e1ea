"""ResNet-110 on CIFAR-10: are computing layers better than no layers (table t3)?

Command: replearn compare t3_resnet110 --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_resnet110. The paper's "- 25 % layers" is `removal`, its "+ computing layers" is `RepL`.
"""

from __future__ import annotations

from dataclasses import replace

from . import t1_resnet110
from ._paper import E2E, PLAIN_REMOVAL, printed, removal, repl

RECIPE = replace(
    t1_resnet110.RECIPE,
    name="t3_resnet110",
    table="t3",
    data=("cifar10",),
    variants=(E2E, removal(), repl()),
    paper=printed("t3", "ResNet-110", {"E2E": "E2E", **PLAIN_REMOVAL, "+ computing layers": "RepL"}),
)
