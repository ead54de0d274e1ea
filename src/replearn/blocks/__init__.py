"""What a block is made of, and where a model has runs of alike blocks."""

from .anatomy import Anatomy, Part
from .stacks import Stack

__all__ = ["Anatomy", "Part", "Stack"]
