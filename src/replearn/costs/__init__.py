"""What training costs, predicted from shapes: parameters, FLOPs, memory, time."""

from .costing import BlockCost, Cost, ModelCost, Promise
from .estimating import estimate, predict
from .machines import Machine, named_machine
from .probing import probe

__all__ = ["BlockCost", "Cost", "Machine", "ModelCost", "Promise", "estimate", "named_machine", "predict", "probe"]
