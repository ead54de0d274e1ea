"""A language model on WikiText-2 (table tab:wikitext2).

## tab_wikitext2: Transformer-LM-12L-512d-8H-2048ff, 3 of 12 blocks replaced (first=2)
Command: replearn compare tab_wikitext2 --seeds 0,1,2,3,4 --set compile=true
Expected: E2E 85.57 ± 0.41, removal 87.03 ± 0.51, RepL projection 87.40 ± 0.44, RepL head-wise 87.16 ± 0.45, RepL
    full 86.41 ± 0.24; removal is worse than E2E, RepL projection is worse than E2E, RepL head-wise is worse than
    E2E, the other differences are undecided
Seeds: five, 0 to 4
Hardware: one H200
Time: 27 minutes; an epoch of E2E 2.54 s, RepL projection 2.12 s (not compiled: 3.91 s and 3.30 s)
Backed by: benchmarks/results/tab_wikitext2.jsonl

Perplexity on the test text, lower is better. The paper gives basic English words seen at least twice, <eos>
after each line, BPTT 128, batch 64, AdamW 3e-4, weight decay 0.01, clipping at 1.0, half precision and 20
epochs. It does not say which operator it used: its row stands beside the projection. Not given: bfloat16,
dropout 0.2, tied output (untied: `--set model=transformer_lm_12l_512d:untied`), cosine decay after one epoch of
warm-up, windows in a new order every epoch. The paper prints a perplexity of 195.42 for E2E, more than twice
ours. The projection takes 0.836 of the time and 0.834 of the memory (paper: 0.851 and 0.880; memory from
benchmarks/results/tab_wikitext2_one_epoch.jsonl)."""

from ...operators.attention_mlp import AttentionMLP
from ...operators.head_wise import HeadWise
from ...operators.projection import Projection
from ..training.recipe import Augment, Optimizer, Recipe, Schedule, Text
from ._paper import E2E, printed, removal, repl

WIKITEXT2 = Recipe(
    name="tab_wikitext2",
    table="tab:wikitext2",
    task="language_modelling",
    model="transformer_lm_12l_512d",
    data=("wikitext2",),
    variants=(
        E2E,
        removal(first=2),
        repl("RepL projection", first=2, operator=Projection()),
        repl("RepL head-wise", first=2, operator=HeadWise()),
        repl("RepL full", first=2, operator=AttentionMLP(attention="head_wise")),
    ),
    epochs=20,
    batch_size=64,
    text=Text(sequence_length=128, min_count=2),
    optimizer=Optimizer(name="adamw", lr=3e-4, weight_decay=0.01),
    schedule=Schedule(name="cosine", warmup_epochs=1),
    augment={"wikitext2": Augment()},
    clip_norm=1.0,
    precision="bfloat16",
    paper=printed("tab:wikitext2", "Transformer-LM-12L-512d-8H-2048ff", {"E2E": "E2E", "RepL": "RepL projection"}),
)
