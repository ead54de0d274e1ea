"""Pictures in files of their own, which matplotlib draws; those of the page are in `chart`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ReplearnError, library

DARK = "@media (prefers-color-scheme: dark) { svg { filter: invert(.88) hue-rotate(180deg) } }"


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches; ReplearnError without matplotlib."""
    figure: Any = library("matplotlib.figure", "report").Figure(
        figsize=(width, height), dpi=150, layout="constrained"
    )
    return figure


def save(figure: Any, path: Path) -> Path:
    """Write the picture, equal data to equal files; an SVG is dark where its reader's page is."""
    svg = path.suffix == ".svg"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with library("matplotlib", "report").rc_context({"svg.hashsalt": "replearn"}):
            figure.savefig(path, metadata={"Date": None} if svg else None)
        if svg:
            path.write_text(
                path.read_text(encoding="utf-8").replace("</style>", f"{DARK}</style>", 1), encoding="utf-8"
            )
    except (OSError, ValueError) as error:
        raise ReplearnError(f"Can't write the picture {path}: {error}.") from error
    return path
