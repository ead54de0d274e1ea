"""Triton kernels, imported where a GPU is used: a machine without Triton never comes here."""
