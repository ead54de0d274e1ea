"""CIFAR-100, where depth pays, so that methods can be told apart. Not in the paper.

Command: replearn compare NAME --seeds 0,1,2,3,4
Seeds: five, 0 to 4
Hardware: one GPU

Beyond the paper's operators: a learned correction, low-rank or full, and K=2, where more depth goes.

## cifar100_resnet110: ResNet-110, trained as t1_resnet110 in bfloat16 and channels last
Command: replearn compare cifar100_resnet110 --seeds 0 --epochs 60
    --methods e2e,removal,repl,removal-k-2,repl-k-2,repl-k-2-full
Expected: E2E 68.50, removal 69.35, RepL 69.14, removal K=2 68.61, RepL K=2 68.16, RepL K=2 full 68.22; all
    differences are undecided
Seeds: one, 0
Hardware: one H200
Time: 4.5 minutes for the six runs
Backed by: benchmarks/results/cifar100_resnet110_60_epochs.jsonl

## cifar100_vit_patch4: a ViT of ViT-Tiny's width and depth with 4x4 patches: 64 tokens instead of 16
Mixup and label smoothing hold off the overfitting of a ViT on 50,000 images.
"""

from dataclasses import replace

from ...operators.attention_mlp import AttentionMLP
from ...operators.basic import Basic
from ...operators.projection import Projection
from ..training.recipe import Augment, Optimizer, Recipe, Variant
from . import t1
from ._paper import COSINE, E2E, SKIP_ATTENTION, removal, repl


def corrected(
    operator: type[Basic] | type[Projection], end: str = "", interval: int = 4, first: int | None = None
) -> tuple[Variant, ...]:
    plain = repl(f"RepL{end}", interval=interval, first=first)
    return (
        removal(f"removal{end}", interval=interval, first=first),
        plain,
        replace(plain, label=f"RepL{end} low-rank", operator=operator(correction="low-rank")),
        replace(plain, label=f"RepL{end} full", operator=operator(correction="full")),
    )


RESNET110 = replace(
    t1.RESNET110,
    name="cifar100_resnet110",
    table="",
    data=("cifar100",),
    variants=(E2E, *corrected(Basic), *corrected(Basic, " K=2", interval=2)),
    augment={"cifar100": Augment(pad=4, pad_mode="reflect", flip=True)},
    precision="bfloat16",
    channels_last=True,
    paper=(),
)
VIT_PATCH4 = Recipe(
    name="cifar100_vit_patch4",
    table="",
    model="vit_patch4",
    data=("cifar100",),
    variants=(
        E2E,
        SKIP_ATTENTION,
        *corrected(Projection, first=2),
        repl("RepL attention+MLP", first=2, operator=AttentionMLP()),
        *corrected(Projection, " K=2", interval=2),
    ),
    epochs=200,
    batch_size=512,
    optimizer=Optimizer(name="adamw", lr=1e-3, weight_decay=0.05, decay_vectors=False),
    schedule=COSINE,
    augment={"cifar100": Augment(pad=4, pad_mode="reflect", flip=True, mixup=0.2)},
    label_smoothing=0.1,
    clip_norm=1.0,
    precision="bfloat16",
)
