"""Are computing layers better than no layers? On CIFAR-10 (table t3) and on ImageNet (table t4).

Command: replearn compare NAME --seeds 0,1,2,3,4
Seeds: five, 0 to 4
Hardware: one GPU; four for ImageNet (torchrun)

The paper's "- 25 % layers" is `removal`, its "+ computing layers" is `RepL`. Of ResNet-34 and the ViTs the
printed equation replaces fewer than 25 %; first=2 gives 4 of 16 and 3 of 12 blocks.

## t3_resnet110: ResNet-110 on CIFAR-10, trained as t1_resnet110

## t3_vit_tiny8: ViT-Tiny/8 on CIFAR-10, trained as t1_vit_tiny8

## t4_resnet34: ResNet-34 on ImageNet, trained as t2_resnet34

## t4_vit_tiny16: ViT-Tiny/16 on ImageNet, trained as t2_vit_tiny16
"""

from dataclasses import replace

from . import t1, t2
from ._paper import BOTH_PLACEMENTS, E2E, EITHER_REMOVAL, PLAIN_REMOVAL, REPL, Labels, printed

LAYERS: Labels = {"E2E": "E2E", **EITHER_REMOVAL, "+ computing layers": REPL}

T3_RESNET110 = replace(
    t1.RESNET110,
    name="t3_resnet110",
    table="t3",
    data=("cifar10",),
    paper=printed("t3", "ResNet-110", {"E2E": "E2E", **PLAIN_REMOVAL, "+ computing layers": "RepL"}),
)
T3_VIT_TINY8 = replace(
    t1.VIT_TINY8,
    name="t3_vit_tiny8",
    table="t3",
    data=("cifar10",),
    variants=(E2E, *BOTH_PLACEMENTS),
    paper=printed("t3", "ViT-Tiny/8", LAYERS),
)
T4_RESNET34 = replace(t2.RESNET34, name="t4_resnet34", table="t4", paper=printed("t4", "ResNet-34", LAYERS))
T4_VIT_TINY16 = replace(
    t2.VIT_TINY16,
    name="t4_vit_tiny16",
    table="t4",
    variants=(E2E, *BOTH_PLACEMENTS),
    paper=printed("t4", "ViT-Tiny/16", LAYERS),
)
