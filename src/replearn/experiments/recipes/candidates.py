"""What might beat removal from scratch at a cost of at most RepL's. Not in the paper.

Command: replearn compare NAME --seeds 10-19
Seeds: ten, 10 to 19; rows are chosen on seeds 0 to 2
Hardware: one GPU

Rows named "late" train whole for the first tenth of the epochs, then fit operators in closed form and go on with
them ("late removal": with nothing). Their time is that of an epoch after that, their memory that of whole epochs.

## candidates_resnet110: ResNet-110 on CIFAR-100, K=2, 60 epochs
"open": gradients reach the neighbours too.

## candidates_wikitext2: the language model of tab_wikitext2, 3 of 12 blocks replaced
"half block": the MLP stays, with weights of its own, and the attention goes; it costs less than RepL full.
"""

from dataclasses import replace

from ...operators.attention_mlp import AttentionMLP
from ...operators.basic import Basic
from ...operators.mlp import MLP
from ...operators.removal import Removal
from ..training.recipe import Variant
from . import cifar100, wikitext2
from ._paper import E2E, removal, repl


def late(row: Variant) -> Variant:
    """The row's operators, or its removal, after a first tenth with every block in its place."""
    operator = Removal() if row.method == "removal" else row.operator
    return replace(row, label=f"late {row.label}", method="late", operator=operator)


REMOVAL_K2 = removal("removal K=2", interval=2)
LOW_RANK = repl("low-rank", interval=2, operator=Basic(correction="low-rank"))
FULL = repl("full", interval=2, operator=Basic(correction="full"))
RESNET110 = replace(
    cifar100.RESNET110,
    name="candidates_resnet110",
    epochs=60,
    variants=(
        E2E,
        REMOVAL_K2,
        FULL,
        replace(LOW_RANK, label="open low-rank", operator=Basic(correction="low-rank", stop_gradient=False)),
        late(REMOVAL_K2),
        late(LOW_RANK),
        late(FULL),
    ),
)

REMOVAL = removal(first=2)
HALF = repl("half block", first=2, operator=MLP(correction="full"))
REPL_FULL = repl("RepL full", first=2, operator=AttentionMLP(attention="head_wise"))
OPEN = AttentionMLP(attention="head_wise", stop_gradient=False)
WIKITEXT2 = replace(
    wikitext2.WIKITEXT2,
    name="candidates_wikitext2",
    table="",
    variants=(
        E2E,
        REMOVAL,
        HALF,
        REPL_FULL,
        replace(REPL_FULL, label="open RepL full", operator=OPEN),
        late(REMOVAL),
        late(HALF),
    ),
    paper=(),
)
