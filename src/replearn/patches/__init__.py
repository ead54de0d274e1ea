"""A transformer's first layer in one kernel, from images to tokens, at inference in half precision."""

from .operation import can_be_cut, embed

__all__ = ["can_be_cut", "embed"]
