"""ResNet-110 on CIFAR-10 with one neighbour as source, or both (table t6).

Command: replearn compare t6_resnet110 --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_resnet110. The paper's row without either neighbour is E2E.
"""

from __future__ import annotations

from dataclasses import replace

from ...operators.basic import Basic
from . import t1_resnet110
from ._paper import E2E, SOURCES, printed, removal, repl

RECIPE = replace(
    t1_resnet110.RECIPE,
    name="t6_resnet110",
    table="t6",
    data=("cifar10",),
    variants=(
        E2E,
        removal(),
        repl("RepL next", operator=Basic(sources="next")),
        repl("RepL previous", operator=Basic(sources="previous")),
        repl("RepL both", operator=Basic(sources="both")),
    ),
    paper=printed("t6", "ResNet-110", SOURCES),
)
