"""What training and running a model costs, predicted from shapes: parameters, FLOPs, memory, time."""

from .budgets import Budget
from .data import Cost, ModelCost, Promise
from .estimator import estimate, predict
from .machines import Machine, named_machine, probe

__all__ = ["Budget", "Cost", "Machine", "ModelCost", "Promise", "estimate", "named_machine", "predict", "probe"]
