"""Faster training steps."""
