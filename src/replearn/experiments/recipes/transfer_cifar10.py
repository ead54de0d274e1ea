"""Transfer: a ViT-T/8 pretrained on classes 0 to 4 of CIFAR-10, fine-tuned on classes 5 to 9.

Command: replearn compare transfer_cifar10 --pretrained FILE --seeds 0,1,2 --equal-time
Expected: E2E 88.29 ± 0.42, removal 87.51 ± 0.29, RepL 87.54 ± 0.14, RepL fitted 87.53 ± 0.25,
    RepL fitted low-rank 87.62 ± 0.59, RepL fitted full 87.91 ± 0.59; removal at equal time 87.79 ± 0.32,
    RepL at equal time 87.97 ± 0.08, RepL fitted at equal time 87.69 ± 0.30,
    RepL fitted low-rank at equal time 87.95 ± 0.27, RepL fitted full at equal time 88.23 ± 0.41
Seeds: three, 0 to 2
Hardware: one H200
Time: 6 minutes; an epoch of E2E 0.34 s, RepL 0.27 s
Backed by: benchmarks/results/transfer_cifar10

For machines without ImageNet weights: FILE is the model.safetensors of transfer_cifar10_pretrain. The rows and the
optimizer are those of tab_finetune_vit, at the images' own 32 pixels, for 20 epochs.
"""

from __future__ import annotations

from dataclasses import replace

from ..training.recipe import Schedule
from . import tab_finetune_vit, transfer_cifar10_pretrain

RECIPE = replace(
    transfer_cifar10_pretrain.RECIPE,
    name="transfer_cifar10",
    variants=tab_finetune_vit.VARIANTS,
    classes=(5, 6, 7, 8, 9),
    epochs=20,
    optimizer=tab_finetune_vit.RECIPE.optimizer,
    schedule=Schedule(name="cosine", warmup_epochs=1),
)
