"""A convolutional network's first layers in kernels of our own, from images to pooled features, at inference."""

from .operation import can_be_cut, packed, stem

__all__ = ["can_be_cut", "packed", "stem"]
