"""ResNet-110 on CIFAR-100: a task on which depth pays, so that methods can be told apart. Ours.

Command: replearn compare cifar100_resnet110 --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_resnet110, faster (bfloat16, channels last). Beyond the paper's operator: a learned correction,
low-rank or full, and K=2, where more depth goes and an operator has more to do.
"""

from __future__ import annotations

from dataclasses import replace

from ...operators.basic import Basic
from ..training.recipe import Augment
from . import t1_resnet110
from ._paper import E2E, removal, repl

RECIPE = replace(
    t1_resnet110.RECIPE,
    name="cifar100_resnet110",
    table="",
    data=("cifar100",),
    variants=(
        E2E,
        removal(),
        repl(),
        repl("RepL low-rank", operator=Basic(correction="low-rank")),
        repl("RepL full", operator=Basic(correction="full")),
        removal("removal K=2", interval=2),
        repl("RepL K=2", interval=2),
        repl("RepL K=2 low-rank", interval=2, operator=Basic(correction="low-rank")),
        repl("RepL K=2 full", interval=2, operator=Basic(correction="full")),
    ),
    augment={"cifar100": Augment(pad=4, pad_mode="reflect", flip=True)},
    precision="bfloat16",
    channels_last=True,
    paper=(),
)
