"""Pretraining for a transfer experiment: a ViT-T/8 on classes 0 to 4 of CIFAR-10, end to end.

Command: replearn train transfer_cifar10_pretrain --method e2e
Expected: not yet measured
Seeds: one, 0
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_vit_tiny8, for 100 epochs. Its model.safetensors is what transfer_cifar10 starts from.
"""

from __future__ import annotations

from dataclasses import replace

from . import t1_vit_tiny8
from ._paper import E2E

RECIPE = replace(
    t1_vit_tiny8.RECIPE,
    name="transfer_cifar10_pretrain",
    table="",
    data=("cifar10",),
    augment={"cifar10": t1_vit_tiny8.RECIPE.augment["cifar10"]},
    variants=(E2E,),
    classes=(0, 1, 2, 3, 4),
    epochs=100,
    precision="bfloat16",
    paper=(),
)
