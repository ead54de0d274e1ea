"""The number that a run is judged by: its name and its direction, from the result file where that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..training.results import Epoch, Result


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What is measured on the test set at every epoch."""

    name: str = "accuracy"
    unit: str = "%"
    better: Literal["higher", "lower"] = "higher"

    @property
    def title(self) -> str:
        return f"test {self.name}, {self.unit}" if self.unit else f"test {self.name}"


def metric_of(result: Result) -> Metric:
    """The recipe's own metric (`metric: {name, unit, better}`), else that of its task."""
    holder = result.recipe.get("metric")
    if isinstance(holder, Mapping) and holder.get("name"):
        better: Literal["higher", "lower"] = "lower" if holder.get("better") == "lower" else "higher"
        return Metric(name=str(holder["name"]), unit=str(holder.get("unit", "")), better=better)
    own = result.metric
    return Metric(name=own.name, unit=own.unit, better="higher" if own.higher_is_better else "lower")


def value_at(epoch: Epoch, metric: Metric) -> float | None:
    """What an epoch reached; None where it was not measured or is not a finite number."""
    found: Any = epoch.measures.get(f"test_{metric.name}")
    return found if isinstance(found, (int, float)) and found == found and abs(found) < 1e300 else None
