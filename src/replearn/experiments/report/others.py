"""Measurements of other kinds: whatever JSON lies beside the results, as tables where it holds rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .collecting import Other
from .markup import Raw, fold, join, table, tag

MOST_ROWS, MOST_COLUMNS, MOST_FILES = 200, 16, 200


def others_part(others: Sequence[tuple[Other, str]]) -> Raw:
    """Each file as a fold: why it is not shown better if it seemed of a known kind, its values, its rows."""
    shown = []
    for other, why in others[:MOST_FILES]:
        reason = [tag("p", f"This file {why}: it is shown as it stands.", class_="note")] if why else []
        shown.append(fold(other.path.as_posix(), *reason, shown_data(other.data), class_="other"))
    if len(others) > MOST_FILES:
        shown.append(tag("p", f"and {len(others) - MOST_FILES} more files."))
    return join(*shown)


def shown_data(data: Any) -> Raw:
    """Values first, then each list of rows as a table; a file without rows is its values alone."""
    if isinstance(data, list):
        data = {"rows": data}
    if not isinstance(data, Mapping):
        return tag("p", f"It holds one value: {plain(data)}")
    values = [(str(key), value) for key, value in data.items() if not is_rows(value)]
    parts = [tag("dl", *(join(tag("dt", key), tag("dd", plain(value))) for key, value in values), class_="values")]
    for key, value in data.items():
        if is_rows(value):
            parts.append(tag("h4", str(key)))
            parts.append(rows_table(value))
    return join(*parts)


def is_rows(value: Any) -> bool:
    """A list of objects, which a table can show."""
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def rows_table(rows: Sequence[Mapping[str, Any]]) -> Raw:
    keys: dict[str, None] = {}
    for row in rows:
        keys |= dict.fromkeys(map(str, row))
    heads = list(keys)[:MOST_COLUMNS]
    body = [[plain(row.get(head)) for head in heads] for row in rows[:MOST_ROWS]]
    left = [i for i, head in enumerate(heads) if any(isinstance(row.get(head), str) for row in rows)]
    shown = table([head.replace("_", " ") for head in heads], body, left, "measurements")
    if len(rows) > MOST_ROWS:
        return join(shown, tag("p", f"and {len(rows) - MOST_ROWS} more rows in the file."))
    return shown


def plain(value: Any) -> str:
    """A value as short text: numbers with few digits, lists and objects on one line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    if isinstance(value, Mapping):
        text = ", ".join(f"{key} {plain(item)}" for key, item in value.items())
    elif isinstance(value, list):
        text = ", ".join(plain(item) for item in value)
    else:
        text = str(value)
    return text if len(text) <= 400 else text[:400] + "…"
