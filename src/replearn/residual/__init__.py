"""A linear layer and the residual sum after it in one kernel, at inference in half precision."""

from .operation import can_be_cut, kernels_run_on, residual_linear

__all__ = ["can_be_cut", "kernels_run_on", "residual_linear"]
