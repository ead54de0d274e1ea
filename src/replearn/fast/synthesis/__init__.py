"""Synthesized weights of many operators in one launch."""
