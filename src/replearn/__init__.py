"""Replacement Learning: train a network with every K-th block replaced by a light operator."""

from . import models, operators
from .anatomy import Anatomy, Part, anatomy
from .backbones import LoadedBackbone, load_backbone_
from .budgets import Budget
from .calibration import Calibration, calibrate_
from .checkpoint import load, save
from .choosing import place
from .costs import Cost, Machine, ModelCost, Promise, estimate, named_machine, predict, probe
from .deployment import deploy
from .errors import ReplearnError
from .folding import Fold, find_folds
from .hugging_face import from_pretrained
from .late_gradients import late_weight_gradients
from .merging import Merge, find_merges
from .narrow import narrow_convolutions
from .normed import fused_norms
from .optimizing import param_groups
from .placements import Placement
from .planning import plan
from .plans import Plan, Target
from .short import short_attention
from .stacks import Stack, find_stacks
from .streamlining import streamline
from .surgery import replace_
from .synthesizing import synthesized

__version__ = "0.1.0"

__all__ = [
    "Anatomy",
    "Budget",
    "Calibration",
    "Cost",
    "Fold",
    "LoadedBackbone",
    "Machine",
    "Merge",
    "ModelCost",
    "Part",
    "Placement",
    "Plan",
    "Promise",
    "ReplearnError",
    "Stack",
    "Target",
    "anatomy",
    "calibrate_",
    "deploy",
    "estimate",
    "find_folds",
    "find_merges",
    "find_stacks",
    "from_pretrained",
    "fused_norms",
    "late_weight_gradients",
    "load",
    "load_backbone_",
    "models",
    "named_machine",
    "narrow_convolutions",
    "operators",
    "param_groups",
    "place",
    "plan",
    "predict",
    "probe",
    "replace_",
    "save",
    "short_attention",
    "streamline",
    "synthesized",
]
