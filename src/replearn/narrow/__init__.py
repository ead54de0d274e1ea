"""Convolutions of few channels, for which cuDNN has no fitting kernel."""

from .layers import find_narrow, narrow_convolutions
from .operation import conv2d, kernels_run_on

__all__ = ["conv2d", "find_narrow", "kernels_run_on", "narrow_convolutions"]
