"""COCO results files: what a detector found, for evaluating elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ReplearnError
from .results import write_atomically

FIELDS = ("image_id", "category_id", "bbox", "score")


def write_results_file(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Write what was found, as COCO's servers and pycocotools take it."""
    write_atomically(path, json.dumps(list(found)))


def read_results_file(path: Path) -> list[dict[str, Any]]:
    """Read it back; ReplearnError for a file that is no COCO results file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ReplearnError(f"Can't read the results file {path}: {error}.") from error
    if not isinstance(found, list):
        raise ReplearnError(f"{path} is not a COCO results file: it holds a {type(found).__name__} and no list.")
    for place, entry in enumerate(found):
        missing = [name for name in FIELDS if not isinstance(entry, dict) or name not in entry]
        if missing:
            raise ReplearnError(
                f"{path} is not a COCO results file: entry {place} has no {missing[0]}. Every entry holds "
                f"{', '.join(FIELDS)}."
            )
    return found
