"""The picture of a comparison: every run's score, each method's spread and verdict, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ReplearnError
from .compare import Comparison, Row
from .comparison_table import heading, signed, spread
from .intervals import Difference
from .metrics import Metric

GREY, BLUE, ORANGE, PALE = "#6b7280", "#1f5fa8", "#c2570c", "#d5d9e0"
VERDICTS = {"better": "#15803d", "worse": "#b91c1c", "undecided": GREY}


def draw(comparison: Comparison, path: str | Path) -> Path:
    """Draw one PNG, for any number of rows; ReplearnError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReplearnError("A picture needs matplotlib: pip install 'replearn[train]'.") from error
    rows = comparison.rows
    figure = Figure(figsize=(11, 1.8 + 0.42 * len(rows)), dpi=150, layout="constrained")
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=(6, 4, 4))
    _scores(left, rows, comparison.metric)
    _words(middle, rows)
    _costs(right, rows)
    left.set_yticks(range(len(rows)), [row.label for row in rows])
    left.set_ylim(len(rows) - 0.4, -0.6)  # the first row on top
    figure.suptitle(heading(comparison), fontsize=10)
    path = Path(path)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ReplearnError(f"Can't write the picture {path}: {error}.") from error
    return path


def colour(row: Row) -> str:
    if row.method in ("e2e", "removal"):
        return GREY
    return ORANGE if "repl" in row.method or row.method == "adaptive" else BLUE


def _scores(axes: Any, rows: Sequence[Row], metric: Metric) -> None:
    """A dot a run, and the mean with its standard deviation; a dotted line at E2E's mean."""
    for y, row in enumerate(rows):
        axes.plot(row.scores, [y] * len(row.seeds), "o", color=colour(row), alpha=0.4, ms=5, mew=0)
        axes.errorbar(row.score, y, xerr=row.std, fmt="D", color=colour(row), ms=6, capsize=4, lw=1.6)
    full = next((row.score for row in rows if row.method == "e2e"), None)
    if full is not None:
        axes.axvline(full, color=GREY, lw=0.8, ls=":", zorder=0)
    low = min(min(*row.scores, row.score - (row.std or 0)) for row in rows)
    high = max(max(*row.scores, row.score + (row.std or 0)) for row in rows)
    margin = max(0.1 * (high - low), 0.1)
    axes.set_xlim(low - margin, high + margin)
    unit = f", {metric.unit}" if metric.unit else ""
    axes.set_xlabel(f"{metric.name} at the last epoch{unit}")
    _plain_frame(axes)


def _words(axes: Any, rows: Sequence[Row]) -> None:
    """The numbers as text, and the verdicts."""
    axes.set_axis_off()
    axes.set_xlim(0, 3)
    counts = {len(row.seeds) for row in rows}
    heads = [f"mean ± std (n={counts.pop()})" if len(counts) == 1 else "mean ± std"]
    columns = [[(spread(row.score, row.std), "black") for row in rows]]
    for head, found in (
        ("against E2E", [row.against_e2e for row in rows]),
        ("against removal", [row.against_removal for row in rows]),
    ):
        if any(found):
            heads.append(head)
            columns.append([_verdict(difference) for difference in found])
    for x, (head, cells) in enumerate(zip(heads, columns, strict=True)):
        axes.text(x + 0.5, -0.6, head, ha="center", va="bottom", fontsize=7.5, color=GREY)
        for y, (text, tint) in enumerate(cells):
            axes.text(x + 0.5, y, text, ha="center", va="center", fontsize=8, color=tint, linespacing=1.3)


def _verdict(difference: Difference | None) -> tuple[str, str]:
    if difference is None:
        return "", GREY
    return f"{signed(difference.mean)}\n{difference.verdict}", VERDICTS[difference.verdict]


def _costs(axes: Any, rows: Sequence[Row]) -> None:
    """Time as a bar and memory as a tick, as ratios to E2E; seconds where there is none to divide by."""
    relative = any(row.time_ratio is not None for row in rows)
    widths = [(row.time_ratio or 0.0) if relative else row.seconds * row.alone for row in rows]
    axes.barh(range(len(rows)), widths, height=0.5, color=PALE, label="time")
    for y, (row, width) in enumerate(zip(rows, widths, strict=True)):
        known = row.time_ratio is not None if relative else row.alone
        text = (f"{width:.2f}" if relative else f"{width:.1f} s") if known else "not measured alone"
        axes.annotate(text, (0, y), (6, 0), textcoords="offset points", va="center", fontsize=8)
    marks = [("memory", "|", BLUE, 15, [row.memory_ratio for row in rows])]
    if relative:
        marks.append(("time in the paper", "x", ORANGE, 6, [row.paper_time_ratio for row in rows]))
    for name, mark, tint, size, values in marks:
        points = [(value, y) for y, value in enumerate(values) if value is not None]
        if points:
            axes.plot(*zip(*points, strict=True), mark, color=tint, ms=size, mew=2, label=name, clip_on=False)
    axes.set_xlabel("ratio to E2E" if relative else "seconds an epoch")
    handles, names = axes.get_legend_handles_labels()
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncols": 3}
    axes.legend(handles[::-1], names[::-1], **place, fontsize=7.5, frameon=False, markerscale=0.6)
    if relative:
        axes.axvline(1, color=GREY, lw=0.8, ls=":", zorder=3)
    _plain_frame(axes)


def _plain_frame(axes: Any) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelsize=8.5)
    axes.xaxis.label.set_size(8.5)
