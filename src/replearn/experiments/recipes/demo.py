"""Handwritten digits on a small ResNet, in about two minutes on a CPU.

## demo: end to end, removal and RepL on scikit-learn's 1,797 real 8x8 images; 3 of 12 blocks replaced
Command: replearn compare demo --seeds 0,1,2
Expected: E2E 98.61 ± 0.56, removal 99.07 ± 0.58, RepL 98.43 ± 0.80; all differences are undecided
Seeds: three, 0 to 2
Hardware: two CPU cores
Time: 1.5 minutes with one thread (OMP_NUM_THREADS=1, as make demo sets it)
Backed by: benchmarks/results/demo_digits.jsonl
"""

from ..training.recipe import Augment, Optimizer, Recipe, Schedule
from ._paper import E2E, removal, repl

DEMO = Recipe(
    name="demo",
    table="",
    model="cifar_resnet:26:8",
    data=("digits",),
    variants=(E2E, removal(first=2), repl(first=2)),
    epochs=12,
    batch_size=64,
    optimizer=Optimizer(name="sgd", lr=0.1, weight_decay=5e-4),
    schedule=Schedule(name="cosine", warmup_epochs=1),
    augment={"digits": Augment(pad=1, pad_mode="zeros")},
)
