"""ResNet-101 on ImageNet (table t2).

Command: replearn compare t2_resnet101 --seeds 0,1,2
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: four GPUs (torchrun), or one with patience
Time: not yet measured
Backed by: not yet measured

5 of 33 blocks are replaced by the printed equation, 9 with first=2.
The printed Bottleneck operator costs about what the block costs; `RepL reduced` is the form that halves it.
The paper gives batch 512, SGD with a rate of 0.2, 90 epochs, a random 224x224 crop and flips. Ours, where it is
silent: Nesterov momentum 0.9, weight decay 1e-4, cosine decay after a warm-up of 5 epochs.
"""

from __future__ import annotations

from ...operators.reduced_bottleneck import ReducedBottleneck
from ..training.recipe import Recipe
from ._paper import BOTH_PLACEMENTS, COSINE, E2E, EITHER, IMAGENET_AUGMENT, IMAGENET_SGD, printed, repl

RECIPE = Recipe(
    name="t2_resnet101",
    table="t2",
    model="resnet101",
    data=("imagenet",),
    variants=(E2E, *BOTH_PLACEMENTS, repl("RepL reduced first=2", first=2, operator=ReducedBottleneck())),
    epochs=90,
    batch_size=512,
    optimizer=IMAGENET_SGD,
    schedule=COSINE,
    augment=IMAGENET_AUGMENT,
    precision="tf32",
    channels_last=True,
    paper=printed("t2", "ResNet-101", EITHER),
)
