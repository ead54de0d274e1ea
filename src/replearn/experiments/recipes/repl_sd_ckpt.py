"""RepL with Stochastic Depth and with checkpointing (table tab:repl_sd_ckpt).

Command: replearn compare NAME --seeds 0,1,2,3,4
Seeds: five, 0 to 4
Hardware: one GPU; four for ImageNet (torchrun)

The paper's numbers come from a single run each. It gives no drop rate: 0.1 for the last block, growing linearly
from 0, is ours.

## tab_repl_sd_ckpt_resnet32: ResNet-32 on CIFAR-10, trained as t1_resnet32
## tab_repl_sd_ckpt_resnet101: ResNet-101 on ImageNet, trained as t2_resnet101, with first=2: 9 of 33 blocks
The paper's memory for RepL (18.01) is not the one in table t2 (18.05).
"""

from dataclasses import replace

from ..training.recipe import Variant
from . import t1, t2
from ._paper import COMBINED, E2E, on_cifar10, printed, removal, repl


def rows(first: int | None) -> tuple[Variant, ...]:
    return (
        E2E,
        removal(first=first),
        repl(first=first),
        Variant(label="Stochastic Depth", method="stochastic_depth"),
        Variant(label="RepL+Stochastic Depth", method="repl+stochastic_depth", first=first),
        Variant(label="Checkpointing", method="checkpointing"),
        Variant(label="RepL+Checkpointing", method="repl+checkpointing", first=first),
    )


TABLE = "tab:repl_sd_ckpt"
RESNET32 = on_cifar10(t1.RESNET32, "tab_repl_sd_ckpt_resnet32", TABLE, rows(first=None), COMBINED)
RESNET101 = replace(
    t2.RESNET101,
    name="tab_repl_sd_ckpt_resnet101",
    table=TABLE,
    variants=rows(first=2),
    paper=printed(TABLE, "ResNet-101", COMBINED),
)
