"""Replacement Learning: train a network with every K-th block replaced by a light operator."""

from . import models, operators
from .anatomy import Anatomy, Part, anatomy
from .calibration import Calibration, calibrate_
from .checkpoint import load, save
from .deployment import deploy
from .errors import ReplearnError
from .folding import Fold, find_folds
from .optimizing import param_groups
from .planning import plan
from .plans import Plan, Target
from .stacks import Stack, find_stacks
from .streamlining import streamline
from .surgery import replace_
from .synthesizing import synthesized

__version__ = "0.1.0"

__all__ = [
    "Anatomy",
    "Calibration",
    "Fold",
    "Part",
    "Plan",
    "ReplearnError",
    "Stack",
    "Target",
    "anatomy",
    "calibrate_",
    "deploy",
    "find_folds",
    "find_stacks",
    "load",
    "models",
    "operators",
    "param_groups",
    "plan",
    "replace_",
    "save",
    "streamline",
    "synthesized",
]
