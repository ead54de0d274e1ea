"""The door `build_report`: a folder of results in; a page and its figures out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ReplearnError
from ..training.results import write_atomically
from .benchmarks import measured_in
from .collecting import Collection, collect
from .page import page
from .sections import Section, sections_of
from .svg import Drawing, standalone_svg

MOST_FIGURES = 400  # files beside the page; the page itself has all of them


@dataclass(frozen=True, kw_only=True)
class Report:
    page: Path
    figures: tuple[Path, ...]
    collection: Collection
    sections: tuple[Section, ...]


def build_report(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], *, title: str = "", figures: bool = True
) -> Report:
    """Write one self-contained HTML page, and each of its figures as SVG in a folder beside it.

    ReplearnError for a folder without results, or where nothing can be written.
    """
    out = Path(out)
    if out.suffix.lower() not in (".html", ".htm"):
        raise ReplearnError(f"The report is one HTML file: write a name such as {out / 'report.html'}, not {out}.")
    collection = collect(folder)
    sections = sections_of(collection)
    beside = out.with_name(f"{out.stem}_figures")
    written: list[Path] = []
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page(collection, sections, title=title))
        if figures:
            drawings = [drawing for section in sections for drawing in section.figures]
            drawings += [drawing for entry in measured_in(collection.others)[0] for drawing in entry.figures]
            written = write_figures(drawings[:MOST_FIGURES], beside)
            for section in sections:
                if section.examples is not None:
                    written.append(beside / f"{section.key}-examples.png")
                    written[-1].write_bytes(section.examples)
    except OSError as error:
        raise ReplearnError(f"Can't write {out}: {error}.") from error
    return Report(page=out, figures=tuple(written), collection=collection, sections=tuple(sections))


def write_figures(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{drawing.name}.svg" for drawing in drawings]
    for drawing, path in zip(drawings, paths, strict=True):
        write_atomically(path, standalone_svg(drawing))
    return paths
