"""The paper's theory as something one can run: what replacing the blocks of a trained model does to it."""

from .analyzing import analyze
from .picture import draw
from .results import Analysis

__all__ = ["Analysis", "analyze", "draw"]
