"""ResNet-32 on CIFAR-10: RepL with Stochastic Depth and with checkpointing (table tab:repl_sd_ckpt).

Command: replearn compare tab_repl_sd_ckpt_resnet32 --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_resnet32. The paper's numbers come from a single run each. It gives no drop rate: 0.1 for the last
block, growing linearly from 0, is ours.
"""

from __future__ import annotations

from dataclasses import replace

from ..training.recipe import Variant
from . import t1_resnet32
from ._paper import COMBINED, E2E, printed, removal, repl

RECIPE = replace(
    t1_resnet32.RECIPE,
    name="tab_repl_sd_ckpt_resnet32",
    table="tab:repl_sd_ckpt",
    data=("cifar10",),
    variants=(
        E2E,
        removal(),
        repl(),
        Variant(label="Stochastic Depth", method="stochastic_depth"),
        Variant(label="RepL+Stochastic Depth", method="repl+stochastic_depth"),
        Variant(label="Checkpointing", method="checkpointing"),
        Variant(label="RepL+Checkpointing", method="repl+checkpointing"),
    ),
    paper=printed("tab:repl_sd_ckpt", "ResNet-32", COMBINED),
)
