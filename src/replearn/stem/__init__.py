"""A convolutional network's first layers in kernels of our own, from images to pooled features, at inference."""

from .operation import FEW, MANY, WINDOW, can_be_cut, stem

__all__ = ["FEW", "MANY", "WINDOW", "can_be_cut", "stem"]
