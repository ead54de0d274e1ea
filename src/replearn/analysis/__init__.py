"""The paper's theory, measured on a trained model: what replacing its blocks changes."""

from .analyzing import analyze
from .convergence import converge
from .results import Analysis

__all__ = ["Analysis", "analyze", "converge"]
