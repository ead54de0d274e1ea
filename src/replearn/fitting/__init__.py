"""What needs data: closed-form fits to trained models, and the plan under a budget."""

from .calibrate import Calibration

__all__ = ["Calibration"]
