"""Fine-tuning a pretrained ViT-S/16 on CIFAR-10, SVHN and STL-10 (table tab:finetune_vit).

Command: replearn compare tab_finetune_vit --data cifar10 --seeds 0,1,2 --pretrained FILE --equal-time
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

The paper starts from weights trained on ImageNet-1K and gives batch 512, AdamW 2e-4 and 100 epochs. Without
--pretrained, timm's weights of that kind come from the hub. 3 of 12 blocks are replaced (first=2), under which its
savings come out. `RepL` starts from the mean of the neighbours; the fitted rows start from the trained blocks,
imitated in closed form on 2,048 training images, without a correction and with one. --equal-time adds rows that
train as long as E2E by the clock. Ours, where the paper is silent: images enlarged to 224 pixels,
weight decay 0.05, cosine decay after a warm-up of 5 epochs, bfloat16.

Without ImageNet weights it was run, compiled, on half of CIFAR-10's classes (docs/transformers.md): after 100
epochs E2E 91.56, removal 91.76, RepL 91.68, fitted 91.48 (one seed). On one H200 an epoch of E2E takes 2.69 s,
RepL 0.793 of that, and 0.777 of the memory (benchmarks/results/tab_finetune_vit_100_epochs).
"""

from __future__ import annotations

from dataclasses import replace

from ...operators.projection import Projection
from ..training.recipe import Optimizer, Recipe
from ._paper import COSINE, E2E, E2E_REPL, SMALL_AUGMENT, SMALL_SETS, printed, removal, repl

FITTED = 2048  # training images
VARIANTS = (
    E2E,
    removal(first=2),
    repl(first=2),
    replace(repl("RepL fitted", first=2, operator=Projection()), calibrate=FITTED),
    replace(
        repl("RepL fitted low-rank", first=2, operator=Projection(correction="low-rank", rank=32)),
        calibrate=FITTED,
    ),
    replace(repl("RepL fitted full", first=2, operator=Projection(correction="full")), calibrate=FITTED),
)

RECIPE = Recipe(
    name="tab_finetune_vit",
    table="tab:finetune_vit",
    model="vit_small_16",
    data=SMALL_SETS,
    variants=VARIANTS,
    epochs=100,
    batch_size=512,
    pretrained="timm:vit_small_patch16_224.augreg_in1k",
    optimizer=Optimizer(name="adamw", lr=2e-4, weight_decay=0.05),
    schedule=COSINE,
    augment={name: replace(augment, resize=224) for name, augment in SMALL_AUGMENT.items()},
    precision="bfloat16",
    paper=printed("tab:finetune_vit", "ViT-S/16", E2E_REPL),
)
