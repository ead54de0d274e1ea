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

from collections.abc import Mapping

from ...operators._base.options import Options, Sources
from ...operators.attention_mlp import AttentionMLP
from ...operators.basic import Basic
from ...operators.mlp import MLP
from ...operators.no_weights import NoWeights
from ...operators.projection import Projection
from ..training.recipe import Variant
from . import t1
from ._paper import E2E, SOURCES, on_cifar10, removal, repl, same

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


def weights(forms: Mapping[str, Options]) -> tuple[Variant, ...]:
    return (E2E, removal(first=2), *(repl(label, first=2, operator=form) for label, form in forms.items()))


def adaptive(first: int | None = None) -> tuple[Variant, ...]:
    moving = Variant(label="Adaptive-RepL", method="adaptive", first=first)
    return (E2E, removal(first=first), repl("Fixed-RepL", first=first), moving)


MOVED = same("Fixed-RepL", "Adaptive-RepL")
RESNET110 = on_cifar10(t1.RESNET110, "t6_resnet110", "t6", sources(Basic), SOURCES)
VIT_TINY8 = on_cifar10(t1.VIT_TINY8, "t6_vit_tiny8", "t6", sources(Projection, first=2), SOURCES)
WEIGHTS = on_cifar10(
    t1.VIT_TINY8, "tab_repl_ablation", "tab:repl_ablation", weights(WEIGHTS_OF), same(*WEIGHTS_OF)
)
COEFFICIENTS = on_cifar10(
    t1.VIT_TINY8,
    "tab_repl_param_ablation",
    "tab:repl_param_ablation",
    weights(COEFFICIENTS_OF),
    same(*COEFFICIENTS_OF),
)
ADAPTIVE = "tab:adaptive_repl"
ADAPTIVE_RESNET32 = on_cifar10(t1.RESNET32, "tab_adaptive_repl_resnet32", ADAPTIVE, adaptive(), MOVED)
ADAPTIVE_VIT_TINY8 = on_cifar10(t1.VIT_TINY8, "tab_adaptive_repl_vit_tiny8", ADAPTIVE, adaptive(first=2), MOVED)
