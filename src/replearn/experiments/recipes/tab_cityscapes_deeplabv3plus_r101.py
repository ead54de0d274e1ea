"""DeepLabV3Plus-R101 on Cityscapes, fine-tuned (table tab:cityscapes_finetune).

Command: replearn compare tab_cityscapes_deeplabv3plus_r101 --seeds 0,1,2 --pretrained FILE
Expected: not yet measured
Seeds: three, 0 to 2
Hardware: one GPU
Time: not yet measured
Backed by: not yet measured

All but the model is as in tab_cityscapes_deeplabv3_r50. The auxiliary head is at the third stage. Needs the
extra scenes.
"""

from __future__ import annotations

from dataclasses import replace

from . import tab_cityscapes_deeplabv3_r50
from ._paper import E2E_REPL, printed

RECIPE = replace(
    tab_cityscapes_deeplabv3_r50.RECIPE,
    name="tab_cityscapes_deeplabv3plus_r101",
    model="deeplabv3plus_resnet101",
    paper=printed("tab:cityscapes_finetune", "DeepLabV3Plus-R101", E2E_REPL),
)
