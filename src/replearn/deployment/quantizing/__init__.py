"""The INT8 room: a deployed model in eight bits, for a CPU, by torchao's maintained interfaces."""

from .dynamic import quantize_dynamic
from .static import quantize_static

__all__ = ["quantize_dynamic", "quantize_static"]
