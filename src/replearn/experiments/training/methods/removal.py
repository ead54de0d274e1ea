"""Removal: the targets of RepL with nothing in their place. The baseline; `Variant.operator` is not read."""

from ....operators._base.options import Options
from ....operators.removal import Removal as Nothing
from .repl import ReplacementLearning


class Removal(ReplacementLearning):
    name = "removal"

    def operator(self) -> Options:
        return Nothing()
