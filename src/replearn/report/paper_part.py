"""The paper's tables with ours beside them: each printed row, and the row of ours that stands for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

from ..training.compare import Row
from ..training.comparison_table import spread
from ..training.paper import SCORES, PaperTable, pair, paper_row, paper_tables
from ..training.recipe import PaperRow
from .markup import Content, Raw, fold, join, table, tag
from .sections import Section
from .tables import difference


def paper_part(sections: Sequence[Section]) -> Raw:
    """Every table of the paper; those with something of ours come first, and open."""
    measured = [(printed, ours_of(printed, sections)) for printed in paper_tables().values()]
    measured.sort(key=lambda entry: not entry[1])
    return join(*(_fold(printed, ours) for printed, ours in measured))


def ours_of(printed: PaperTable, sections: Sequence[Section]) -> Mapping[int, tuple[Row, Section]]:
    """By the number of the printed row, our row that carries these very numbers as the paper's."""
    rows: dict[tuple[Any, ...], tuple[Row, Section]] = {}
    for section in sections:
        for row in section.comparison.rows if section.comparison else ():
            if row.paper is not None:
                rows.setdefault(_numbers(row.paper), (row, section))
    found = {}
    for index, entry in enumerate(printed.rows):
        if any(key in entry for key in SCORES) and (match := rows.get(_numbers(paper_row(entry, "")))):
            found[index] = match
    return found


def _numbers(row: PaperRow) -> tuple[Any, ...]:
    return astuple(replace(row, label=""))


def _fold(printed: PaperTable, ours: Mapping[int, tuple[Row, Section]]) -> Raw:
    about = [key for key in ("data", "backbone", "method") if any(key in row for row in printed.rows)]
    heads = [*about, *printed.columns.values()]
    if ours:
        heads += ["ours", "against E2E", "time ratio", "memory ratio", "where"]
    body: list[list[Content]] = []
    for index, row in enumerate(printed.rows):
        cells: list[Content] = [str(row.get(key, "")) for key in about]
        cells += [printed_value(row.get(key)) for key in printed.columns]
        if ours:
            cells += _ours(*ours[index]) if index in ours else ["not yet measured", "", "", "", ""]
        body.append(cells)
    count = f"{len(ours)} of {len(printed.rows)} rows measured" if ours else "not measured here"
    left = [*range(len(about)), *([len(heads) - 4, len(heads) - 1] if ours else [])]
    summary = join(tag("b", printed.label), f" {printed.caption} ", tag("span", count, class_="quiet"))
    notes = [tag("p", printed.notes, class_="quiet")] if printed.notes else []
    return fold(summary, table(heads, body, left, printed.caption), *notes, open_=bool(ours), class_="paper")


def _ours(row: Row, section: Section) -> list[Content]:
    assert section.comparison is not None
    changed = any(note.startswith("not the recipe") for note in section.comparison.notes)
    times = "" if row.time_ratio is None else f"{row.time_ratio:.3f}"
    memory = "" if row.memory_ratio is None else f"{row.memory_ratio:.3f}"
    where = tag("a", section.recipe + (" (other settings)" if changed else ""), href=f"#{section.key}")
    return [tag("b", spread(row.score, row.std)), difference(row.against_e2e), times, memory, where]


def printed_value(value: Any) -> str:
    """A printed number as the paper has it, with ± where it gives a spread."""
    mean, std = pair(value)
    if mean is None:
        return ""
    return f"{mean:g}" if std is None else f"{mean:.2f} ± {std:.2f}"
