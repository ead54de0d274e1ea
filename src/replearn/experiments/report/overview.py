"""The picture of a comparison: every run's score, each method's mean with its spread, verdict and cost."""

from __future__ import annotations

import math
from pathlib import Path

from ..training.compare import Comparison, Row
from ..training.comparison_table import heading, signed, spread
from ..training.results import write_atomically
from .chart import WIDTH, Case, Dot, dot_figure
from .svg import Drawing, series_roles, standalone_svg


def draw(comparison: Comparison, path: str | Path) -> Path:
    path = Path(path)
    write_atomically(path, standalone_svg(overview_figure(comparison, "comparison", wide=True)))
    return path


def overview_figure(comparison: Comparison, name: str, *, wide: bool = False) -> Drawing:
    """A line a method; a wide picture, which has no table beside it, also says what each method costs."""
    metric, cases = comparison.metric, []
    roles = series_roles([row.method for row in comparison.rows])
    for row, role in zip(comparison.rows, roles, strict=True):
        dots = [
            Dot(value=score, role=role, faint=True, tip=f"{row.label}, seed {seed}\n{metric.text(score)}")
            for seed, score in zip(row.seeds, row.scores, strict=True)
            if math.isfinite(score) and len(row.scores) > 1
        ]
        if math.isfinite(row.score):
            std = row.std or 0.0
            tip = f"{row.label}\n{spread(row.score, row.std)} {metric.unit}"
            dots.append(Dot(value=row.score, low=row.score - std, high=row.score + std, role=role, tip=tip))
        cases.append(Case(label=in_words(row, wide), dots=tuple(dots)))
    full = next((row.score for row in comparison.rows if row.method == "e2e" and math.isfinite(row.score)), None)
    return dot_figure(
        [*([Case(label=heading(comparison))] if wide else []), *cases],
        name=name,
        title=f"{metric.name.capitalize()} of every run",
        about=f"{metric.title}: a faint dot a run, the mean over seeds with its standard deviation.",
        x_title=metric.title,
        rule=None if full is None else (full, "E2E"),
        width=2 * WIDTH if wide else WIDTH,
    )


def in_words(row: Row, costs: bool) -> str:
    parts = [f"{row.label}: {spread(row.score, row.std)}"]
    if row.against_e2e is not None:
        parts.append(f"{signed(row.against_e2e.mean)}, {row.against_e2e.verdict}")
    if costs and row.time_ratio is not None:
        parts.append(f"time {row.time_ratio:.2f}")
    if costs and row.memory_ratio is not None:
        parts.append(f"memory {row.memory_ratio:.2f} of E2E")
    return ", ".join(parts)
