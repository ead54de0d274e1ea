"""Decide which blocks go and what stands in their place; touch nothing."""

from .data import Plan, Target

__all__ = ["Plan", "Target"]
