"""The door `build_report`: a folder of results in; a page and its figures out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ReplearnError
from ..training.results import write_atomically
from .collecting import Collection, collect
from .kinds import measured_in
from .page import page
from .png import write_png
from .scene import Drawing
from .sections import Section, sections_of
from .svg import standalone_svg

MOST_FIGURES = 400  # files beside the page; the page itself has all of them


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was written, and what it shows."""

    page: Path
    figures: tuple[Path, ...]
    collection: Collection
    sections: tuple[Section, ...]


def build_report(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    title: str = "",
    svg: bool = True,
    png: bool = True,
) -> Report:
    """Write one self-contained HTML page, and each of its figures as SVG and PNG in a folder beside it.

    ReplearnError for a folder without results, or where nothing can be written.
    """
    out = Path(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise ReplearnError(f"The report is one HTML file: write a name such as {out / 'report.html'}, not {out}.")
    collection = collect(folder)
    sections = sections_of(collection)
    text = page(collection, sections, title=title)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReplearnError(f"Can't write {out}: {error}.") from error
    write_atomically(out, text)
    drawings = [drawing for section in sections for drawing in (*section.figures, *section.strips)]
    drawings += [drawing for entry in measured_in(collection.others)[0] for drawing in entry.found.figures]
    beside = out.with_name(f"{out.stem}_figures")
    figures = write_figures(drawings[:MOST_FIGURES], beside, svg=svg, png=png)
    for section in sections if png else ():
        if section.examples is not None:
            beside.mkdir(parents=True, exist_ok=True)
            figures.append(beside / f"{section.key}-examples.png")
            figures[-1].write_bytes(section.examples)
    return Report(page=out, figures=tuple(figures), collection=collection, sections=tuple(sections))


def write_figures(drawings: Sequence[Drawing], folder: Path, *, svg: bool, png: bool) -> list[Path]:
    """Each drawing as NAME.svg and NAME.png."""
    written: list[Path] = []
    if not drawings or not (svg or png):
        return written
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReplearnError(f"Can't write the figures into {folder}: {error}.") from error
    for drawing in drawings:
        if svg:
            written.append(folder / f"{drawing.name}.svg")
            write_atomically(written[-1], standalone_svg(drawing))
        if png:
            written.append(folder / f"{drawing.name}.png")
            write_png(drawing, written[-1])
    return written
