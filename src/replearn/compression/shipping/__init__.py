"""A compressed model as the standard architecture with fewer blocks."""

from .ship import Shipped, ship, standard

__all__ = ["Shipped", "ship", "standard"]
