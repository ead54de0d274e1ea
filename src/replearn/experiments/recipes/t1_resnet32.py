"""ResNet-32 on CIFAR-10, SVHN and STL-10 (table t1).

Command: replearn compare t1_resnet32 --data cifar10 --seeds 0,1,2 --epochs 100 --together 9
    --set precision=bfloat16 --set channels_last=true
Expected: E2E 92.17 ± 0.12, removal 91.84 ± 0.05, RepL 91.97 ± 0.33; RepL against either: undecided
Seeds: three, 0 to 2
Hardware: one H200
Time: 7.5 minutes for the nine runs together
Backed by: benchmarks/results/t1_resnet32_cifar10_100_epochs

The full 250 epochs, and SVHN and STL-10, are not yet measured.
3 of 15 blocks are replaced; first=2 would replace as many.
Ours, where the paper is silent: Nesterov momentum 0.9, weight decay 1e-4, cosine decay after a warm-up of 5
epochs (without it a rate of 0.8 does not train), zeros as padding on SVHN and STL-10. Its GPU memory on STL-10
is CIFAR-10's to the digit, which nine times larger images can't have.
"""

from __future__ import annotations

from ..training.recipe import Recipe
from ._paper import COSINE, E2E, E2E_REPL, SMALL_AUGMENT, SMALL_SETS, SMALL_SGD, printed, removal, repl

RECIPE = Recipe(
    name="t1_resnet32",
    table="t1",
    model="resnet32",
    data=SMALL_SETS,
    variants=(E2E, removal(), repl()),
    epochs=250,
    batch_size=1024,
    optimizer=SMALL_SGD,
    schedule=COSINE,
    augment=SMALL_AUGMENT,
    precision="tf32",
    paper=printed("t1", "ResNet-32", E2E_REPL),
)
