"""Fused operations: one file each, with the plain-torch reference; Triton code in `_triton`."""
