"""What readers of segmentation sets share: the count of their pictures."""

from __future__ import annotations

from pathlib import Path

from ....errors import ReplearnError
from .defects import Defects
from .scenes import SegmentationSet
from .source import Source


def check_counts(
    found: SegmentationSet, source: Source, folder: Path, strict: bool, defects: Defects | None
) -> SegmentationSet:
    """The set, if it has as many pictures as it should; under `skip` any number is taken."""
    if strict and (defects is None or defects.policy == "refuse"):
        for which, count, right in (
            ("training", found.num_train, source.num_train),
            ("test", found.num_test, source.num_test),
        ):
            if count != right:
                raise ReplearnError(
                    f"{folder} holds {count:,} {which} pictures, and {source.title} has {right:,}. {source.how}"
                )
    return found
