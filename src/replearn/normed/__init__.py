"""BatchNorm, the sum with a residual, and ReLU as one, in training."""

from .layers import fused_norms, num_fused
from .operation import normed

__all__ = ["fused_norms", "normed", "num_fused"]
