"""Take blocks out of a trained model: recognise, choose, fit, realign, heal, measure, or all in one call."""

from .choose import Choice, choose
from .compress import Compressed, compress
from .fit import Fitted, fit_
from .heal import Healing, heal_
from .measure import Agreement, Price, costs
from .recognise import Recognition, recognise
from .shipping import Shipped, ship, standard

__all__ = [
    "Agreement",
    "Choice",
    "Compressed",
    "Fitted",
    "Healing",
    "Price",
    "Recognition",
    "Shipped",
    "choose",
    "compress",
    "costs",
    "fit_",
    "heal_",
    "recognise",
    "ship",
    "standard",
]
