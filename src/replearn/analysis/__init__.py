"""The paper's theory as something one can run: what replacing the blocks of a trained model does to it."""

from .analyzing import analyze
from .convergence import converge
from .results import Analysis

__all__ = ["Analysis", "analyze", "converge"]
