"""Pictures with what runs found in them, side by side: the truth, E2E, RepL, from the runs' folders."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ReplearnError
from ..training.examples import FOLDER, LEGEND
from .collecting import RunFile

WIDTH, GAP, TITLE = 320, 8, 20  # of one picture, between two, and above a column
MOST_COLUMNS = 6


def example_sheet(root: Path, runs: Sequence[RunFile]) -> bytes | None:
    """One PNG: a column for the truth and one for each method, a row a picture; None where there are none."""
    columns = columns_of(root, runs)
    if not columns:
        return None
    from PIL import Image, ImageDraw

    first = next(iter(columns.values()))
    rows = [column_of(Image, first, "truth"), *(column_of(Image, folder, "found") for folder in columns.values())]
    titles = ["truth", *columns]
    count = min(len(column) for column in rows)
    heights = [max(column[place].height for column in rows) for place in range(count)]
    legend = legend_of(Image, first)
    below = 0 if legend is None else legend.height + GAP
    size = (len(rows) * (WIDTH + GAP) + GAP, TITLE + sum(heights) + GAP * (count + 1) + below)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for number, (title, column) in enumerate(zip(titles, rows, strict=True)):
        left, top = GAP + number * (WIDTH + GAP), TITLE
        pen.text((left, 4), title, fill="black")
        for place in range(count):
            sheet.paste(column[place], (left, top))
            top += heights[place] + GAP
    if legend is not None:
        sheet.paste(legend, (GAP, size[1] - below))
    held = io.BytesIO()
    sheet.save(held, format="PNG")
    return held.getvalue()


def columns_of(root: Path, runs: Sequence[RunFile]) -> dict[str, Path]:
    """The folder of pictures of each method, E2E first; of several seeds the lowest."""
    found: dict[str, Path] = {}
    for run in sorted(runs, key=lambda run: (str(run.result.variant["method"]) != "e2e", run.result.seed)):
        folder = root / run.path.parent / FOLDER
        if (folder / "0-truth.png").is_file() and len(found) < MOST_COLUMNS:
            found.setdefault(str(run.result.variant["label"]), folder)
    return found


def legend_of(image: Any, folder: Path) -> Any:
    """The classes' colours, where a run has written them."""
    return opened(image, folder / LEGEND) if (folder / LEGEND).is_file() else None


def column_of(image: Any, folder: Path, which: str) -> list[Any]:
    """The pictures of one column, brought to one width."""
    made = []
    for path in sorted(folder.glob(f"*-{which}.png")):
        picture = opened(image, path)
        made.append(picture.resize((WIDTH, max(1, round(picture.height * WIDTH / picture.width)))))
    return made


def opened(image: Any, path: Path) -> Any:
    try:
        return image.open(path).convert("RGB")
    except (OSError, ValueError) as error:
        raise ReplearnError(f"{path} is no picture that can be read ({error}).") from error


def as_address(png: bytes) -> str:
    """A picture as an address that a page needs no file for."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
