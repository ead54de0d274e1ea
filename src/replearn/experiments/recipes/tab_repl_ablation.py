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

from ...operators.attention_mlp import AttentionMLP
from ...operators.mlp import MLP
from ...operators.no_weights import NoWeights
from ...operators.projection import Projection
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
        *printed("t1", "ViT-Tiny/8", {"E2E": "E2E"}, data="cifar10"),
        *printed(
            "tab:repl_ablation",
            "ViT-Tiny/8",
            {
                "RepL": "RepL attention+MLP",
                "RepL (only Attention weights)": "RepL only attention",
                "RepL (only MLP weights)": "RepL only MLP",
                "RepL (no weights)": "RepL no weights",
            },
        ),
    ),
)
