"""Runs that have only begun, and files that are not shown, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from ..markup import table, tag
from . import Entry, View, card

ORDER = 90
MOST = 200


def entries(view: View) -> Iterator[Entry]:
    if begun := view.collection.begun:
        names = [tag("li", tag("code", path.as_posix())) for path in begun[:MOST]]
        yield card("begun", "Just begun", tag("ul", *names))
    unread = [*((entry.path, entry.reason) for entry in view.collection.unread), *view.rest]
    if unread:
        rows = [(path.as_posix(), reason) for path, reason in unread[:MOST]]
        yield card("unread", "Files not read", table(("file", "why"), rows, "files not read"))
