"""ViT-Small/16 on ImageNet with a strong modern recipe: the paper's baseline is 12 points below it.

Command: replearn compare t2_vit_small_modern --seeds 0,1,2
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: four GPUs (torchrun), or one with patience
Time: not yet measured
Backed by: not yet measured

After Beyer, Zhai and Kolesnikov, "Better plain ViT baselines for ImageNet-1k" (2022), who report 76.5 % after
90 epochs; their model pools over tokens and has fixed positions, this one is timm's with a class token. Their
weight decay of 1e-4 is not multiplied by the rate, so 0.1 here. The paper's rows are left out on purpose: they
belong to another recipe (t2_vit_small16).
"""

from __future__ import annotations

from ..training.recipe import Augment, Optimizer, Recipe, Schedule
from ._paper import BOTH_PLACEMENTS, E2E, SKIP_ATTENTION

RECIPE = Recipe(
    name="t2_vit_small_modern",
    table="",
    model="vit_small_16",
    data=("imagenet",),
    variants=(E2E, SKIP_ATTENTION, *BOTH_PLACEMENTS),
    epochs=90,
    batch_size=1024,
    optimizer=Optimizer(name="adamw", lr=1e-3, weight_decay=0.1, decay_vectors=False),
    schedule=Schedule(name="cosine", warmup_epochs=8),
    augment={"imagenet": Augment(resize=224, flip=True, rand_augment=True, mixup=0.2)},
    clip_norm=1.0,
    precision="bfloat16",
)
