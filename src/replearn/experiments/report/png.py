"""A drawing as PNG, by matplotlib: the same marks, in the light colours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import ReplearnError
from .scene import PALETTE, Area, Disc, Drawing, Line, Mark, Text

SCALE = 2.0  # pixels for each unit of the drawing


def write_png(drawing: Drawing, path: Path) -> None:
    """Draw one PNG; ReplearnError where matplotlib is missing or the file can't be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ReplearnError(
            "PNG figures need matplotlib: pip install 'replearn[report]', or write --no-png."
        ) from error
    inch = 72.0  # a unit of the drawing is a point, so that font sizes need no change
    figure = Figure(figsize=(drawing.width / inch, drawing.height / inch), dpi=inch * SCALE)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.set_axis_off()
    figure.set_facecolor(PALETTE["ground"][0])
    for mark in drawing.marks:
        _draw(axes, mark)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ReplearnError(f"Can't write the figure {path}: {error}.") from error


def _draw(axes: Any, mark: Mark) -> None:
    from matplotlib.patches import Circle, FancyBboxPatch, Polygon

    tint = PALETTE[mark.role][0]
    if isinstance(mark, Line):
        axes.plot(*zip(*mark.points, strict=True), color=tint, lw=mark.width, ls="--" if mark.dash else "-")
    elif isinstance(mark, Area):
        axes.add_patch(Polygon(mark.points, color=tint, alpha=mark.opacity, lw=0))
    elif isinstance(mark, Text):
        axes.text(
            mark.x,
            mark.y,
            mark.text.replace("$", r"\$"),
            color=tint,
            fontsize=mark.size,
            ha={"start": "left", "middle": "center", "end": "right"}[mark.anchor],
            va="baseline",
            weight="bold" if mark.bold else "normal",
            rotation=90 if mark.upright else 0,
            rotation_mode="anchor",
        )
    else:
        look: dict[str, Any] = {"alpha": mark.opacity, "color": tint, "lw": 0, "fill": True}
        if mark.hollow:
            look |= {"fill": False, "lw": 1.5, "ls": "--"}
        if isinstance(mark, Disc):
            axes.add_patch(Circle((mark.x, mark.y), mark.radius, **look))
        else:
            style = "round,pad=0,rounding_size=2"
            axes.add_patch(FancyBboxPatch((mark.x, mark.y), mark.width, mark.height, boxstyle=style, **look))
