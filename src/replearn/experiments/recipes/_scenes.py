"""What the recipes of detection and segmentation share: rows, optimizers and sizes.

The paper gives for COCO: Adam 4e-5, batch 8, 100 epochs; for Cityscapes: SGD 0.1, batch 16, crop 768, 30,000
steps. Its savings come out under first=2, so that is the placement of the rows; the reduced bottleneck stands
beside the printed operator, which costs as much as the block that it replaces. Not given by the paper, and
ours: everything else.
"""

from __future__ import annotations

from ...operators.reduced_bottleneck import ReducedBottleneck
from ..training.recipe import Optimizer, Schedule
from ._paper import E2E, removal, repl

ROWS = (
    E2E,
    removal(first=2),
    repl(first=2),
    repl("RepL reduced", first=2, operator=ReducedBottleneck()),
)
ADAM = Optimizer(name="adam", lr=4e-5, weight_decay=0.0)
POLY_SGD = Optimizer(name="sgd", lr=0.1, momentum=0.9, nesterov=False, weight_decay=1e-4)
POLY = Schedule(name="poly", power=0.9)
CONSTANT = Schedule(name="constant")
