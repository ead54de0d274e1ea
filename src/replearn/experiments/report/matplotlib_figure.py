"""Pictures in files of their own, which matplotlib draws; those of the page are in `chart`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import ReplearnError
from ..training.architectures import library


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches; ReplearnError without matplotlib."""
    figure: Any = library("matplotlib.figure", "report").Figure(
        figsize=(width, height), dpi=150, layout="constrained"
    )
    return figure


def save(figure: Any, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ReplearnError(f"Can't write the picture {path}: {error}.") from error
    return path
