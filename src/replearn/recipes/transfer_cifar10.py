"""Transfer: a ViT-T/8 pretrained on classes 0 to 4 of CIFAR-10, fine-tuned on classes 5 to 9.

Command: replearn compare transfer_cifar10 --pretrained FILE --seeds 0,1,2 --equal-time
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

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
