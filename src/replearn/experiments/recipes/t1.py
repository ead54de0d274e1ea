"""Small images from scratch (table t1), and on CIFAR-10 against removal (table t3).

Command: replearn compare NAME --data cifar10 --seeds 0,1,2,3,4
Seeds: five, 0 to 4
Hardware: one GPU

Not given by the paper: Nesterov momentum 0.9, weight decay, cosine decay after a warm-up of 5 epochs (without it
a rate of 0.8 does not train), zeros as padding on SVHN and STL-10. Its GPU memory on STL-10 equals CIFAR-10's,
which nine times larger images can't have.

## t1_resnet32: ResNet-32, 3 of 15 blocks replaced
Command: replearn compare t1_resnet32 --data cifar10 --seeds 0,1,2,3,4 --epochs 100
    --methods e2e,removal,repl,repl-first-2 --set precision=bfloat16 --set channels_last=true
Expected: E2E 92.18 ± 0.11, removal 91.81 ± 0.04, RepL 91.87 ± 0.22, RepL first=2 91.88 ± 0.29; removal is worse
    than E2E, the other differences are undecided
Seeds: five, 0 to 4
Hardware: one H200
Time: 9.4 minutes, 8.4 with --together 4; an epoch of E2E 0.217 s, RepL 0.200 s
Backed by: benchmarks/results/t1_resnet32_cifar10_100_epochs.jsonl

## t1_resnet110: ResNet-110, 12 of 54 blocks replaced
## t1_vit_tiny8: ViT-Tiny/8
Command: replearn compare t1_vit_tiny8 --data cifar10 --seeds 0,1,2 --epochs 60 --together 5
    --methods e2e,removal,repl,repl-first-2,skip-attention --set precision=bfloat16
Expected: E2E 78.40 ± 0.57, Skip-Attention 79.91 ± 0.39, removal 78.69 ± 0.66, RepL 78.23 ± 0.13, RepL first=2
    78.23 ± 0.17; all differences are undecided
Seeds: three, 0 to 2
Hardware: one H200
Time: 5 minutes
Backed by: benchmarks/results/t1_vit_tiny8_cifar10_60_epochs.jsonl
The printed equation replaces 2 of 12 blocks, first=2 replaces 3 and gives the paper's savings. The operator is
the projection, the paper's basic form for a ViT."""

from dataclasses import replace

from ..training.recipe import Recipe
from . import _paper as shared
from ._paper import printed

RESNET32 = Recipe(
    name="t1_resnet32",
    table="t1",
    model="resnet32",
    data=shared.SMALL_SETS,
    variants=(shared.E2E, *shared.BOTH_PLACEMENTS),
    epochs=250,
    batch_size=1024,
    optimizer=shared.SMALL_SGD,
    schedule=shared.COSINE,
    augment=shared.SMALL_AUGMENT,
    precision="tf32",
    paper=printed("t1", "ResNet-32", shared.EITHER),
)
RESNET110 = replace(
    RESNET32,
    name="t1_resnet110",
    model="resnet110",
    paper=(
        *printed("t1", "ResNet-110", shared.EITHER),
        *printed("t3", "ResNet-110", shared.EITHER_REMOVAL),
    ),
)
VIT_TINY8 = replace(
    RESNET32,
    name="t1_vit_tiny8",
    model="vit_tiny_8",
    variants=(shared.E2E, shared.SKIP_ATTENTION, *shared.BOTH_PLACEMENTS),
    batch_size=512,
    optimizer=shared.SMALL_ADAMW,
    paper=printed("t1", "ViT-Tiny/8", shared.WITH_SKIP) + printed("t3", "ViT-Tiny/8", shared.EITHER_REMOVAL),
)
