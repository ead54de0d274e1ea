"""ResNet-101 on ImageNet: RepL with Stochastic Depth and with checkpointing (table tab:repl_sd_ckpt).

Command: replearn compare tab_repl_sd_ckpt_resnet101 --seeds 0,1,2
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: four GPUs (torchrun), or one with patience
Time: not yet measured
Backed by: not yet measured

Trained as t2_resnet101, with first=2: 9 of 33 blocks. The paper's numbers come from a single run each, and its
memory for RepL (18.01) is not the one in table t2 (18.05). It gives no drop rate: 0.1 for the last block,
growing linearly from 0, is ours.
"""

from __future__ import annotations

from dataclasses import replace

from ..training.recipe import Variant
from . import t2_resnet101
from ._paper import COMBINED, E2E, printed, removal, repl

RECIPE = replace(
    t2_resnet101.RECIPE,
    name="tab_repl_sd_ckpt_resnet101",
    table="tab:repl_sd_ckpt",
    variants=(
        E2E,
        removal(first=2),
        repl(first=2),
        Variant(label="Stochastic Depth", method="stochastic_depth"),
        Variant(label="RepL+Stochastic Depth", method="repl+stochastic_depth", first=2),
        Variant(label="Checkpointing", method="checkpointing"),
        Variant(label="RepL+Checkpointing", method="repl+checkpointing", first=2),
    ),
    paper=printed("tab:repl_sd_ckpt", "ResNet-101", COMBINED),
)
