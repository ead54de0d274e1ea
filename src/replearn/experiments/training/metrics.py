"""Metrics of a task: their names, their direction, and how they are printed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One measure on the test set; `key` is its name in result files and logs, which may be shorter.

    >>> Metric(name="perplexity", higher_is_better=False).text(193.312)
    '193.31'
    """

    name: str
    higher_is_better: bool = True
    unit: str = ""
    short: str = ""

    @property
    def key(self) -> str:
        return f"test_{self.short or self.name}"

    @property
    def sign(self) -> int:
        """1 where more is better, else -1: `sign * value` is always better when it is higher."""
        return 1 if self.higher_is_better else -1

    @property
    def title(self) -> str:
        """For an axis or a column: `test accuracy, %`, `test perplexity (lower is better)`."""
        unit = f", {self.unit}" if self.unit else ""
        return f"test {self.name}{unit}{'' if self.higher_is_better else ' (lower is better)'}"

    def at(self, measures: Mapping[str, Any]) -> float | None:
        """An epoch's value; None if it was not measured or is not finite."""
        found = measures.get(self.key)
        return found if isinstance(found, (int, float)) and math.isfinite(found) else None

    def text(self, value: float) -> str:
        return f"{value:.2f} {self.unit}".rstrip()
