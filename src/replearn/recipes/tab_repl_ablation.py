"""ViT-Tiny/8 on CIFAR-10: which weights of the neighbours count (table tab:repl_ablation)?

Command: replearn compare tab_repl_ablation --seeds 0,1,2,3,4
Expected: not yet measured
Seeds: five, 0 to 4
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

Trained as t1_vit_tiny8, with first=2: 3 of 12 blocks. The paper's "RepL" is `RepL attention+MLP`, the form that
reads both kinds of weights; "only Attention" is the projection, "no weights" a learnable map of its own.
"""

from __future__ import annotations

from dataclasses import replace

from ..operators.attention_mlp import AttentionMLP
from ..operators.mlp import MLP
from ..operators.no_weights import NoWeights
from ..operators.projection import Projection
from . import t1_vit_tiny8
from ._paper import E2E, printed, removal, repl

RECIPE = replace(
    t1_vit_tiny8.RECIPE,
    name="tab_repl_ablation",
    table="tab:repl_ablation",
    data=("cifar10",),
    variants=(
        E2E,
        removal(first=2),
        repl("RepL attention+MLP", first=2, operator=AttentionMLP()),
        repl("RepL only attention", first=2, operator=Projection()),
        repl("RepL only MLP", first=2, operator=MLP()),
        repl("RepL no weights", first=2, operator=NoWeights()),
    ),
    paper=(
        printed("cifar10", "E2E", 72.77, 1.31, 2.81, 6.81),  # from table t1
        printed("cifar10", "RepL attention+MLP", 73.71, 1.08, 2.08, 5.65),
        printed("cifar10", "RepL only attention", 72.39, 0.97, 2.05, 5.59),
        printed("cifar10", "RepL only MLP", 72.14, 1.34, 2.07, 5.53),
        printed("cifar10", "RepL no weights", 69.30, 2.11, 2.02, 5.20),
    ),
)
