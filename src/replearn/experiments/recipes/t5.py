"""Intervals K = 2, 4 and 6 on CIFAR-10 (table t5).

Command: replearn compare NAME --seeds 0,1,2,3,4
Seeds: five, 0 to 4
Hardware: one GPU

Removal at each interval is the floor, which the paper does not print.

## t5_resnet110: ResNet-110, trained as t1_resnet110; 24, 12 and 6 of 54 blocks are replaced
## t5_vit_tiny8: ViT-Tiny/8, trained as t1_vit_tiny8
The printed equation replaces 5, 2 and 1 of 12 blocks; first=2 replaces 5, 3 and 2, which is what the paper's
memory (0.60, 0.74 and 0.85 of E2E) says."""

from ..training.recipe import Variant
from . import t1
from ._paper import E2E, Labels, either, on_cifar10, removal, repl


def rows(*intervals: int, first: int | None = None) -> tuple[Variant, ...]:
    end = "" if first is None else f" first={first}"
    return tuple(
        make(f"{label} K={interval}{end}", interval=interval, first=first)
        for interval in intervals
        for label, make in (("removal", removal), ("RepL", repl))
    )


ROWS = {f"k={interval}": f"RepL K={interval}" for interval in (2, 4, 6)}
EITHER: Labels = {"k=2": "RepL K=2", "k=4": either("RepL K=4"), "k=6": either("RepL K=6")}
RESNET110 = on_cifar10(t1.RESNET110, "t5_resnet110", "t5", (E2E, *rows(2, 4, 6)), ROWS)
VIT_TINY8 = on_cifar10(t1.VIT_TINY8, "t5_vit_tiny8", "t5", (E2E, *rows(2, 4, 6), *rows(4, 6, first=2)), EITHER)
