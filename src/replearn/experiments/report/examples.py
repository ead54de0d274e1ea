"""Pictures with what runs found in them, side by side: the truth, E2E, RepL, from the runs' folders."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ReplearnError
from ..training.examples import FOLDER, LEGEND
from ..training.results import LARGEST
from .collecting import RunFile, leads_out

WIDTH, GAP, TITLE = 320, 8, 20  # of one picture, between two, and above a column
MOST_COLUMNS, MOST_ROWS = 6, 12
MOST_PIXELS, TALLEST = 50_000_000, 4 * WIDTH


def example_sheet(root: Path, runs: Sequence[RunFile]) -> bytes | None:
    """One PNG: a column for the truth and one for each method, a row a picture; None where there are none."""
    columns = columns_of(root, runs)
    if not columns:
        return None
    from PIL import Image, ImageDraw

    first = next(iter(columns.values()))
    rows = [column_of(root, first, "truth"), *(column_of(root, folder, "found") for folder in columns.values())]
    count = min(map(len, rows))
    heights = [max(column[place].height for column in rows) for place in range(count)]
    legend = opened(root, first / LEGEND) if (first / LEGEND).is_file() else None
    if legend is not None:
        legend = legend.crop((0, 0, min(legend.width, MOST_COLUMNS * WIDTH), min(legend.height, TALLEST)))
    below = 0 if legend is None else legend.height + GAP
    size = (len(rows) * (WIDTH + GAP) + GAP, TITLE + sum(heights) + GAP * (count + 1) + below)
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    for number, (title, column) in enumerate(zip(["truth", *columns], rows, strict=True)):
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


def column_of(root: Path, folder: Path, which: str) -> list[Any]:
    """The pictures of one column, brought to one width; a very tall one is squeezed."""
    made = []
    for path in sorted(folder.glob(f"*-{which}.png"))[:MOST_ROWS]:
        picture = opened(root, path)
        height = max(1, min(round(picture.height * WIDTH / picture.width), TALLEST))
        made.append(picture.resize((WIDTH, height)))
    return made


def opened(root: Path, path: Path) -> Any:
    """A picture of bounded size that lies in the folder; ReplearnError for anything else."""
    from PIL import Image

    place = path.relative_to(root)
    if leads_out(path, root):
        raise ReplearnError(f"{place} is a link that leads out of the folder.")
    if not path.is_file() or path.stat().st_size > LARGEST:
        raise ReplearnError(f"{place} is no picture that can be read (not an ordinary file, or too large).")
    try:
        with Image.open(path) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise ValueError(f"{picture.width}x{picture.height} pixels are too many")
            return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ReplearnError(f"{place} is no picture that can be read ({error}).") from error
