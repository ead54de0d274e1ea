"""LayerNorm with its result in half precision, in one kernel, at inference."""

from .operation import rounded_norm

__all__ = ["rounded_norm"]
