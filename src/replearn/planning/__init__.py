"""Decide which blocks are removed and what replaces them, without changing the model."""

from .data import Plan, Target

__all__ = ["Plan", "Target"]
