"""CIFAR-100, where depth pays, so that methods can be told apart. Not in the paper.

Command: replearn compare NAME --seeds 0,1,2,3,4
Seeds: five, 0 to 4
Hardware: one GPU

Beyond the paper's operators: a learned correction, low-rank or full, and K=2, where more depth goes.

## cifar100_resnet110: ResNet-110, trained as t1_resnet110 in bfloat16 and channels last

## cifar100_vit_patch4: a ViT of ViT-Tiny's width and depth with 4x4 patches: 64 tokens instead of 16
Mixup and label smoothing hold off the overfitting of a ViT on 50,000 images.
"""

from __future__ import annotations

from dataclasses import replace

from ...operators.attention_mlp import AttentionMLP
from ...operators.basic import Basic
from ...operators.projection import Projection
from ..training.recipe import Augment, Optimizer, Recipe
from . import t1
from ._paper import COSINE, E2E, SKIP_ATTENTION, removal, repl

RESNET110 = replace(
    t1.RESNET110,
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
VIT_PATCH4 = Recipe(
    name="cifar100_vit_patch4",
    table="",
    model="vit_patch4",
    data=("cifar100",),
    variants=(
        E2E,
        SKIP_ATTENTION,
        removal(first=2),
        repl(first=2),
        repl("RepL attention+MLP", first=2, operator=AttentionMLP()),
        repl("RepL low-rank", first=2, operator=Projection(correction="low-rank")),
        repl("RepL full", first=2, operator=Projection(correction="full")),
        removal("removal K=2", interval=2),
        repl("RepL K=2", interval=2),
        repl("RepL K=2 low-rank", interval=2, operator=Projection(correction="low-rank")),
        repl("RepL K=2 full", interval=2, operator=Projection(correction="full")),
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
