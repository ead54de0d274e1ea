"""Triton kernels and their tile tables."""
