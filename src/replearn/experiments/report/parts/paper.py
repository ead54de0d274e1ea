"""The paper's tables of which something was measured: each printed row, and ours that stands for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from ...training.compare import Row
from ...training.comparison_table import ratio, spread
from ...training.paper import SCORES, PaperTable, pair, paper_row, paper_tables
from ...training.recipe import PaperRow
from ..kinds import Beside, Measured
from ..markup import Content, Raw, fold, join, table, tag, text_of
from ..sections import Section
from . import Entry, View, card
from .comparisons import difference

ORDER = 50
REACHED = ("ours", "against E2E")
HEADS = (*REACHED, "time ratio", "memory ratio", "where")


@dataclass(frozen=True)
class Ours:
    """What stands beside one printed row: a row of a comparison, a benchmark's measurement, or both."""

    row: Row | None = None
    section: Section | None = None
    beside: Beside | None = None
    measured: Measured | None = None

    def cells(self) -> dict[str, Content]:
        """What we reached; time and memory from the comparison, or from a benchmark where that has none."""
        row, beside, places = self.row, self.beside, list[Raw]()
        time, memory = (row.time_ratio, row.memory_ratio) if row else (None, None)
        reached = spread(row.score, row.std) if row else ""
        if beside is not None:
            time = beside.time if time is None else time
            memory = beside.memory if memory is None else memory
            reached = beside.reached or reached
        if self.section is not None and self.section.comparison is not None:
            changed = any(note.startswith("not the recipe") for note in self.section.comparison.notes)
            name = self.section.recipe + (" (other settings)" if changed else "")
            places.append(tag("a", name, href=f"#{self.section.key}"))
        if self.measured is not None:
            places.append(tag("a", self.measured.path.name, href=f"#{self.measured.key}"))
        where = join(*(tag("span", place, " ") for place in places))
        shown = tag("b", reached) if reached else "costs alone"
        against = difference(row.against_e2e) if row else ""
        return dict(zip(HEADS, (shown, against, ratio(time), ratio(memory), where), strict=True))


def entries(view: View) -> Iterator[Entry]:
    found = [(printed, ours_of(printed, view.sections, view.measured)) for printed in paper_tables().values()]
    tables = [_fold(printed, ours) for printed, ours in found if ours]
    if tables:
        note = "As the paper prints them. Rows of ours that carry the same numbers stand beside them."
        yield card("paper", "The tables of the paper", tag("p", note, class_="quiet"), *tables)


def ours_of(
    printed: PaperTable, sections: Sequence[Section], measured: Sequence[Measured] = ()
) -> Mapping[int, Ours]:
    """By the number of the printed row: our row that names this one as the paper's, and benchmarks."""
    rows: dict[tuple[Any, ...], Ours] = {}
    for section in sections:
        for row in section.comparison.rows if section.comparison else ():
            if row.paper is not None:
                rows.setdefault(_identity(row.paper, row.method == "e2e"), Ours(row, section))
    found: dict[int, Ours] = {}
    for index, entry in enumerate(printed.rows):
        if any(key in entry for key in SCORES):
            identity = _identity(paper_row(entry, "", printed.label), entry["method"] == "E2E")
            found |= {index: rows[identity]} if identity in rows else {}
    for one in measured:
        for beside in one.found.beside:
            held = found.get(beside.row, Ours())
            if beside.table == printed.label and held.beside is None:
                found[beside.row] = replace(held, beside=beside, measured=one)
    return found


def _identity(row: PaperRow, e2e: bool) -> tuple[Any, ...]:
    """A printed row without our label; E2E is one run in every table, other methods are not."""
    return astuple(replace(row, label="", table="" if e2e else row.table))


def _fold(printed: PaperTable, ours: Mapping[int, Ours]) -> Raw:
    about = [key for key in ("data", "backbone", "method") if any(key in row for row in printed.rows)]
    cells = {index: entry.cells() for index, entry in ours.items()}
    shown = [head for head in HEADS if any(text_of(row[head]) for row in cells.values())]
    score = next((key for key in SCORES if key in printed.columns), None)
    order: list[str] = []  # ours directly behind the number that it is to be held against
    for key in printed.columns:
        order += [key, *(head for head in REACHED if key == score and head in shown)]
    order += [head for head in shown if head not in order]
    body: list[list[Content]] = []
    for index, row in enumerate(printed.rows):
        held = cells.get(index, {"ours": "not yet measured"})
        values = [printed_value(row.get(key)) if key in printed.columns else held.get(key, "") for key in order]
        body.append([*(str(row.get(key, "")) for key in about), *values])
    count = f"{len(ours)} of {len(printed.rows)} rows measured"
    summary = join(tag("b", printed.label), f" {printed.caption} ", tag("span", count, class_="quiet"))
    notes = [tag("p", printed.notes, class_="quiet")] if printed.notes else []
    heads = [*about, *(printed.columns.get(key, key) for key in order)]
    return fold(summary, table(heads, body, printed.caption), *notes)


def printed_value(value: Any) -> str:
    """A printed number as the paper has it, with ± where it gives a spread."""
    mean, std = pair(value)
    if mean is None:
        return ""
    return f"{mean:g}" if std is None else f"{mean:.2f} ± {std:.2f}"
