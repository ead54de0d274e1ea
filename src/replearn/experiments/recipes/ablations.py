"""Ablations on CIFAR-10: sources (t6), weights, coefficients, and targets that move (tab:adaptive_repl).

Command: replearn compare NAME --seeds 0,1,2,3,4
Seeds: five, 0 to 4
Hardware: one GPU

Trained as in t1, ViTs with first=2: 3 of 12 blocks. The rows without stop-gradient, which the paper does not
print, train the neighbours through the operator as well.

## t6_resnet110: ResNet-110 with one neighbour as source, or both; the paper's row without either is E2E
## t6_vit_tiny8: ViT-Tiny/8 with one neighbour as source, or both; the paper's row without either is E2E
## tab_repl_ablation: ViT-Tiny/8: which weights of the neighbours count
`RepL` is the form that reads both kinds of weights, "only Attention" the projection, "no weights" a learnable map
of its own.

## tab_repl_param_ablation: ViT-Tiny/8: one coefficient for both neighbours, or two
## tab_adaptive_repl_resnet32: ResNet-32: targets chosen anew each epoch, or fixed
## tab_adaptive_repl_vit_tiny8: ViT-Tiny/8: targets chosen anew each epoch, or fixed
"""

from dataclasses import replace

from ...operators._base.options import Sources
from ...operators.attention_mlp import AttentionMLP
from ...operators.basic import Basic
from ...operators.mlp import MLP
from ...operators.no_weights import NoWeights
from ...operators.projection import Projection
from ..training.recipe import Variant
from . import t1
from ._paper import E2E, SOURCES, beside_e2e, printed, removal, repl, same

SIDES: tuple[Sources, ...] = ("next", "previous", "both")
# by the paper's labels
WEIGHTS_OF = {
    "RepL": AttentionMLP(),
    "RepL (only Attention weights)": Projection(),
    "RepL (only MLP weights)": MLP(),
    "RepL (no weights)": NoWeights(),
}
COEFFICIENTS_OF = {
    "RepL (2 parameters)": Projection(),
    "RepL (1 parameter)": Projection(coefficients="shared"),
}


def sources(operator: type[Basic] | type[Projection], first: int | None = None) -> tuple[Variant, ...]:
    sides = [repl(f"RepL {side}", first=first, operator=operator(sources=side)) for side in SIDES]
    through = repl("RepL no stop-gradient", first=first, operator=operator(stop_gradient=False))
    return (E2E, removal(first=first), *sides, through)


RESNET110 = replace(
    t1.RESNET110,
    name="t6_resnet110",
    table="t6",
    data=("cifar10",),
    variants=sources(Basic),
    paper=printed("t6", "ResNet-110", SOURCES),
)
VIT_TINY8 = replace(
    t1.VIT_TINY8,
    name="t6_vit_tiny8",
    table="t6",
    data=("cifar10",),
    variants=sources(Projection, first=2),
    paper=printed("t6", "ViT-Tiny/8", SOURCES),
)
WEIGHTS = replace(
    VIT_TINY8,
    name="tab_repl_ablation",
    table="tab:repl_ablation",
    variants=(
        E2E,
        removal(first=2),
        *(repl(label, first=2, operator=operator) for label, operator in WEIGHTS_OF.items()),
    ),
    paper=beside_e2e("tab:repl_ablation", "ViT-Tiny/8", same(*WEIGHTS_OF)),
)
COEFFICIENTS = replace(
    VIT_TINY8,
    name="tab_repl_param_ablation",
    table="tab:repl_param_ablation",
    variants=(
        E2E,
        removal(first=2),
        *(repl(label, first=2, operator=operator) for label, operator in COEFFICIENTS_OF.items()),
    ),
    paper=beside_e2e("tab:repl_param_ablation", "ViT-Tiny/8", same(*COEFFICIENTS_OF)),
)
ADAPTIVE_RESNET32 = replace(
    t1.RESNET32,
    name="tab_adaptive_repl_resnet32",
    table="tab:adaptive_repl",
    data=("cifar10",),
    variants=(E2E, removal(), repl("Fixed-RepL"), Variant(label="Adaptive-RepL", method="adaptive")),
    paper=beside_e2e("tab:adaptive_repl", "ResNet-32", same("Fixed-RepL", "Adaptive-RepL")),
)
ADAPTIVE_VIT_TINY8 = replace(
    VIT_TINY8,
    name="tab_adaptive_repl_vit_tiny8",
    table="tab:adaptive_repl",
    variants=(
        E2E,
        removal(first=2),
        repl("Fixed-RepL", first=2),
        Variant(label="Adaptive-RepL", method="adaptive", first=2),
    ),
    paper=beside_e2e("tab:adaptive_repl", "ViT-Tiny/8", same("Fixed-RepL", "Adaptive-RepL")),
)
