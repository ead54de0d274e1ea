"""One fold a benchmark's file: figures, tables, and the command that makes it again."""

from __future__ import annotations

from collections.abc import Iterator

from ..kinds import Table
from ..markup import Raw, command, fold, join, table, tag
from . import Entry, View, figures, folded

ORDER = 40
MOST_ROWS = 24  # a longer table is folded


def entries(view: View) -> Iterator[Entry]:
    for measured in view.measured:
        found = measured.found
        parts = [tag("p", found.about, class_="quiet")] if found.about else []
        parts += [figures(found.figures), *(_table(shown, found.title) for shown in found.tables)]
        if measured.command:
            parts.append(tag("p", command(measured.command)))
        made = f"Measured on {measured.made_on}. File: {measured.path.as_posix()}"
        parts.append(tag("p", made, class_="quiet"))
        words = measured.path.as_posix()
        yield folded(measured.key, measured.title, words, found.sentence, *parts, opened=view.opened)


def _table(shown: Table, label: str) -> Raw:
    made = table(shown.heads, shown.rows, shown.title or label)
    if len(shown.rows) > MOST_ROWS:
        return fold(f"{shown.title or 'Every number'} ({len(shown.rows)} rows)", made)
    return join(tag("h3", shown.title), made) if shown.title else made
