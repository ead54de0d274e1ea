"""Fine-tuning a pretrained ViT (table tab:finetune_vit), and a transfer that needs no ImageNet weights.

Seeds: three, 0 to 2
Hardware: one GPU

3 of 12 blocks are replaced (first=2), under which the paper's savings come out. `RepL` starts from the mean of
the neighbours; the fitted rows start from the trained blocks, imitated in closed form on 2,048 training images,
without a correction and with one. --equal-time adds rows that train as long as E2E by the clock.

## tab_finetune_vit: ViT-S/16 on CIFAR-10, SVHN and STL-10
Command: replearn compare tab_finetune_vit --data cifar10 --seeds 0,1,2 --pretrained FILE --equal-time

The paper starts from weights trained on ImageNet-1K and gives batch 512, AdamW 2e-4 and 100 epochs. Without
--pretrained, timm's weights of that kind come from the hub. Not given: images enlarged to 224 pixels, weight
decay 0.05, cosine decay after a warm-up of 5 epochs, bfloat16. Pretrained on half of CIFAR-10's classes instead
(docs/transformers.md), after 100 epochs: E2E 91.56, removal 91.76, RepL 91.68, fitted 91.48, one seed
(benchmarks/results/tab_finetune_vit_100_epochs.jsonl).

## transfer_cifar10_pretrain: ViT-T/8 on classes 0 to 4 of CIFAR-10, end to end, as t1_vit_tiny8, for 100 epochs
Command: replearn train transfer_cifar10_pretrain --method e2e
Seeds: one, 0

## transfer_cifar10: ViT-T/8 pretrained on classes 0 to 4 of CIFAR-10, fine-tuned on classes 5 to 9
Command: replearn compare transfer_cifar10 --pretrained FILE --seeds 0,1,2 --equal-time
Expected: E2E 88.29 ± 0.42, removal 87.51 ± 0.29, RepL 87.54 ± 0.14, RepL fitted 87.53 ± 0.25, RepL fitted low-rank
    87.62 ± 0.59, RepL fitted full 87.91 ± 0.59, removal at equal time 87.79 ± 0.32, RepL at equal time 87.97 ±
    0.08, RepL fitted at equal time 87.69 ± 0.30, RepL fitted full at equal time 88.23 ± 0.41, RepL fitted low-rank
    at equal time 87.95 ± 0.27; all differences are undecided
Hardware: one H200
Time: 6 minutes; an epoch of E2E 0.34 s, RepL 0.27 s
Backed by: benchmarks/results/transfer_cifar10.jsonl

FILE is the model.safetensors of transfer_cifar10_pretrain.
"""

from dataclasses import replace

from ...operators.projection import Projection
from ..training.recipe import Optimizer, Recipe, Schedule, Variant
from . import t1
from ._paper import COSINE, E2E, E2E_REPL, SMALL_AUGMENT, SMALL_SETS, printed, removal, repl


def fitted(label: str, operator: Projection) -> Variant:
    return replace(repl(label, first=2, operator=operator), calibrate=2048)


FINETUNE = Recipe(
    name="tab_finetune_vit",
    table="tab:finetune_vit",
    model="vit_small_16",
    data=SMALL_SETS,
    variants=(
        E2E,
        removal(first=2),
        repl(first=2),
        fitted("RepL fitted", Projection()),
        fitted("RepL fitted low-rank", Projection(correction="low-rank", rank=32)),
        fitted("RepL fitted full", Projection(correction="full")),
    ),
    epochs=100,
    batch_size=512,
    pretrained="timm:vit_small_patch16_224.augreg_in1k",
    optimizer=Optimizer(name="adamw", lr=2e-4, weight_decay=0.05),
    schedule=COSINE,
    augment={name: replace(augment, resize=224) for name, augment in SMALL_AUGMENT.items()},
    precision="bfloat16",
    paper=printed("tab:finetune_vit", "ViT-S/16", E2E_REPL),
)
PRETRAIN = replace(
    t1.VIT_TINY8,
    name="transfer_cifar10_pretrain",
    table="",
    data=("cifar10",),
    augment={"cifar10": SMALL_AUGMENT["cifar10"]},
    variants=(E2E,),
    classes=(0, 1, 2, 3, 4),
    epochs=100,
    precision="bfloat16",
    paper=(),
)
TRANSFER = replace(
    PRETRAIN,
    name="transfer_cifar10",
    variants=FINETUNE.variants,
    classes=(5, 6, 7, 8, 9),
    epochs=20,
    optimizer=FINETUNE.optimizer,
    schedule=Schedule(name="cosine", warmup_epochs=1),
)
