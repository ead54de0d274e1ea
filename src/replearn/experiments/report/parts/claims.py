"""Does it hold? The paper's claims with ours and the verdicts, where runs of several tables lie together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from ...claims import PAPER, tables
from ...training.results import Result
from ..markup import fold, table, tag
from . import Entry, View, card

ORDER = 20


def entries(view: View) -> Iterator[Entry]:
    groups: dict[Path, list[Result]] = defaultdict(list)
    for run in view.collection.runs:
        groups[run.group].append(run.result)
    if len(groups) < 2:
        return
    known = {measured.path for measured in view.measured}
    benches = {other.path.name: other.data for other in view.collection.others if other.path in known}
    made = tables(list(groups.values()), benches)
    if made[0].title != PAPER:
        return
    note = "Verdicts are corrected by Holm's method over the differences of a table."
    folds = [
        fold(f"{shown.title} ({len(shown.rows)} rows)", tag("p", shown.about), table(shown.heads, shown.rows))
        for shown in made
    ]
    yield card("holds", "Does it hold?", tag("p", note, class_="quiet"), *folds)
