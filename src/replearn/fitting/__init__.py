"""What needs data: closed-form fits to trained models, scores of blocks, and the choice under a budget."""

from .calibrate import Calibration
from .choose import Placement, place

__all__ = ["Calibration", "Placement", "place"]
